"""Configs for unequal hosts that are found by trying, as a patient user would."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

SCHEDULES, IN_FLIGHT, MESSAGES = ("1f1b", "zero-bubble"), (0, 1, 2), (1, 2, 4)

GIVEN_UP = 1.3
"""How many times as long as those of the best so far a try's steps may take."""

SPREAD = 0.4
"""How far the parts of random tries are from those by the hosts' speeds, as a logarithm."""

DRAWN = 100
"""Attempts to find a config that was not tried."""


@dataclass(frozen=True)
class Try:
    """A config.

    Attributes:
        hosts: their numbers, in the order of the stages.
        in_flight: bundles in flight per stage; 0: as many as the schedule needs.
    """

    hosts: tuple[int, ...]
    balance: tuple[int, ...]
    schedule: str = "1f1b"
    in_flight: int = 0
    messages: int = 1

    def options(self, num_microbatches: int) -> dict[str, Any]:
        """Return the keys of a config; None: its default."""
        most = self.in_flight * len(self.hosts) * self.messages
        return {
            "schedule": self.schedule,
            "max_in_flight": min(most, num_microbatches) or None,
            "microbatches_per_message": self.messages,
        }


@dataclass(frozen=True)
class Searcher:
    """Tries random configs first, and then others that are near the best.

    Args:
        speeds: of the hosts.
        seconds: of a config's steps; infinite if they are clearly longer than the limit.
    """

    speeds: Sequence[float]
    num_layers: int
    seconds: Callable[[Try, float], float]
    rng: random.Random

    def search(self, tries: int) -> Try:
        """Return the best config of so many."""
        found: dict[Try, float] = {}
        for number in range(tries):
            best = min(found, key=found.__getitem__) if number >= tries / 2 else None
            for _ in range(DRAWN):
                if (new := self.neighbour(best) if best else self.random()) not in found:
                    break
            limit = GIVEN_UP * min(found.values(), default=math.inf)
            found[new] = self.seconds(new, limit)
        return min(found, key=found.__getitem__)

    def random(self) -> Try:
        """Return a config to begin with: parts that are about as large as the hosts are fast."""
        hosts, balance = self._cut()
        schedule, in_flight = self.rng.choice(SCHEDULES), self.rng.choice(IN_FLIGHT)
        return Try(hosts, balance, schedule, in_flight, self.rng.choice(MESSAGES))

    def neighbour(self, best: Try) -> Try:
        """Return a config that differs from another one in one respect."""
        places = range(len(best.hosts))
        one, other = self.rng.sample(places, 2)
        match self.rng.choice(("layers", "order", "hosts", "schedule", "in_flight", "messages")):
            case "layers":
                number = self.rng.randint(1, max(1, self.num_layers // 12))
                number = min(number, best.balance[one] - 1)
                moved = {one: -number, other: number}
                balance = tuple(best.balance[place] + moved.get(place, 0) for place in places)
                return replace(best, balance=balance)
            case "order":  # each host keeps its number of layers
                order = [{one: other, other: one}.get(place, place) for place in places]
                hosts = tuple(best.hosts[place] for place in order)
                return replace(best, hosts=hosts, balance=tuple(best.balance[i] for i in order))
            case "hosts":
                hosts, balance = self._cut()
                return replace(best, hosts=hosts, balance=balance)
            case "schedule":
                return replace(best, schedule=self.rng.choice(SCHEDULES))
            case "in_flight":
                return replace(best, in_flight=self.rng.choice(IN_FLIGHT))
            case _:
                return replace(best, messages=self.rng.choice(MESSAGES))

    def _cut(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count = self.rng.randint(2, len(self.speeds))
        hosts = tuple(self.rng.sample(range(len(self.speeds)), count))
        weights = [self.speeds[host] * self.rng.lognormvariate(0, SPREAD) for host in hosts]
        return hosts, split(self.num_layers, weights)


def split(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return parts of `count` by their weights, each at least 1."""
    parts = [1] * len(weights)
    while sum(parts) < count:
        parts[max(range(len(parts)), key=lambda part: weights[part] / (parts[part] + 0.5))] += 1
    return tuple(parts)


def fastest_cuts(count: int, speeds: Sequence[float], number: int) -> list[list[int]]:
    """Return the cuts of equal layers whose slowest stages have least to do."""
    ends = itertools.combinations(range(1, count), len(speeds) - 1)
    cuts = ([b - a for a, b in itertools.pairwise((0, *each, count))] for each in ends)

    def busy(cut: list[int]) -> list[float]:
        return sorted((part / speed for part, speed in zip(cut, speeds, strict=True)), reverse=True)

    return sorted(cuts, key=busy)[:number]
