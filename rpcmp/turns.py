"""Which replica of a stage computes which bundle of micro-batches: by a fixed rule.

With equal shares in turn, 0 1 2 0 1 2; with shares [2, 1] as evenly mixed as can be, 0 1 0 0 1 0.
The rule knows only the config, so a run that is replayed, resumed or done again in one process has
every micro-batch where it was, and with it every sum of gradients. Pure.

The mixing is the smooth weighted round-robin of nginx (ngx_http_upstream_round_robin.c): each
turn every replica gains its share, and the richest one pays the sum of all shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple


def num_bundles(num_microbatches: int, per_message: int) -> int:
    """Bundles of a mini-batch, if at most `per_message` micro-batches share a message."""
    return -(-num_microbatches // per_message)


class Turns:
    """The turns of the replicas of one stage.

    Args:
        shares: how many of `sum(shares)` consecutive bundles each replica takes; one a replica.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.num_replicas = len(shares)
        divisor = math.gcd(*shares)
        self._shares = [share // divisor for share in shares]
        self._numbers: dict[tuple[int, int], list[int]] = {}

    def owner(self, bundle: int) -> int:
        """The replica that computes a bundle, by its number in the round."""
        return self._cycle[bundle % len(self._cycle)]

    def numbers(self, replica: int, num_bundles: int) -> list[int]:
        """The bundles of a round that a replica computes, in order; none where others suffice."""
        found = self._numbers.get((replica, num_bundles))
        if found is None:  # it is asked for every bundle, and a job has few numbers of bundles
            found = [bundle for bundle in range(num_bundles) if self.owner(bundle) == replica]
            self._numbers[replica, num_bundles] = found
        return found

    def most(self, num_bundles: int) -> int:
        """The most bundles of a round that any replica computes."""
        return max(len(self.numbers(r, num_bundles)) for r in range(self.num_replicas))

    @cached_property
    def _cycle(self) -> list[int]:
        total, found = sum(self._shares), []
        gained = [0] * self.num_replicas
        for _ in range(total):
            gained = [have + share for have, share in zip(gained, self._shares, strict=True)]
            richest = max(range(self.num_replicas), key=gained.__getitem__)
            gained[richest] -= total
            found.append(richest)
        return found


class Share(NamedTuple):
    """One replica's part of every round."""

    turns: Turns
    replica: int

    def numbers(self, num_bundles: int) -> list[int]:
        """The bundles that it computes of a round of so many, in order."""
        return self.turns.numbers(self.replica, num_bundles)


def by_speed(seconds: Sequence[float], num_bundles: int) -> list[int]:
    """The shares with which replicas of unequal speed end a round soonest.

    One bundle after the other goes to whoever would end it first; of equals, to the first.

    Args:
        seconds: that each replica takes for a bundle.
        num_bundles: of a round.
    """
    shares = [0] * len(seconds)
    for _ in range(max(num_bundles, len(seconds))):
        ends = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return [max(1, share) for share in shares]
