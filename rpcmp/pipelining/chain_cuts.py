"""The best cuts for hosts in a given order, if no part of the chain takes longer than a time. Pure.

Whether there are any is decided from the end of the chain, by the layers at which a suffix of it
can start:

    layers      0  1  2  3  4  5          {c} can start at 4 or 5: it takes two layers in that time
    [a, b, c]   └─a─┘└─b─┘└─c──┘          {b, c} at 2, 3 or 4: where b ends, c starts

Every start is kept, not just the earliest, since memory and transfers may prefer another one. As
the bits of an integer, such sets of starts take a few shifts per host. Times are whole nanoseconds,
so that sums are exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rpcmp.pipelining.partition import HostProfile

NANOSECONDS = 10**9

UNLIMITED = 2**62
"""Nanoseconds, or bytes, that are no limit."""

FORBIDDEN = 2 * UNLIMITED
"""Nanoseconds of a transfer that must not be."""

Transfer = Callable[[int, int, int], int]
"""Nanoseconds per step that a link is busy from a host to another, if a stage starts at a layer."""

Held = Callable[[int, int], int]
"""Micro-batches that a stage holds, by the number of stages and of those from it to the loss."""


class HostCosts:
    """What consecutive layers cost on one host.

    Args:
        profile: the layers, measured on that host.
        limit_bytes: memory limit of its stage; None: no limit.
        num_microbatches: per step.
        recompute: whether it holds only its inputs and recomputes activations.
        besides_s: seconds per step that it computes besides its layers, whichever they are.
    """

    def __init__(
        self,
        profile: HostProfile,
        limit_bytes: int | None,
        num_microbatches: int,
        recompute: bool = False,
        besides_s: float = 0.0,
    ) -> None:
        forwards = 2 if recompute else 1
        layers = profile.layers
        self.profile, self.limit_bytes = profile, limit_bytes
        self.num_layers, self._recompute = len(layers), recompute
        self._besides_ns = round(NANOSECONDS * besides_s)
        self._ns = _sums(
            round(
                NANOSECONDS
                * (
                    num_microbatches
                    * (forwards * layer.forward_s + layer.backward_s + layer.weight_s)
                    + layer.update_s
                )
            )
            for layer in layers
        )
        self._kept = _sums(layer.state_bytes for layer in layers)
        self._activations = _sums(layer.activation_bytes for layer in layers)
        self._lasts: dict[tuple[int, int], list[int]] = {}

    @property
    def total_ns(self) -> int:
        """Nanoseconds per step of the whole model."""
        return self.ns(0, self.num_layers)

    def ns(self, start: int, end: int) -> int:
        """Return the nanoseconds per step of the layers from `start` up to `end`."""
        return self._ns[end] - self._ns[start] + self._besides_ns

    def memory(self, start: int, end: int, held: int) -> int:
        """Return the bytes that these layers need while it holds that many micro-batches."""
        activations = 1 if self._recompute else held
        return (
            self.profile.base_bytes
            + held * self.profile.layers[start].input_bytes
            + self._kept[end]
            - self._kept[start]
            + activations * (self._activations[end] - self._activations[start])
        )

    def lasts(self, most_ns: int) -> list[int]:
        """Return the last end of layers from each start that take no longer than that.

        It is not behind the start if there are none.
        """
        ends, most = self._ns, most_ns - self._besides_ns
        return [bisect_right(ends, begun + most) - 1 for begun in ends[:-1]]

    def lasts_in_memory(self, held: int, extra: int) -> list[int]:
        """Return the last end of layers from each start that fit, with `extra` bytes of memory."""
        if (held, extra) not in self._lasts:
            self._lasts[held, extra] = [
                self._last_in_memory(start, held, extra) for start in range(self.num_layers)
            ]
        return self._lasts[held, extra]

    def _last_in_memory(self, start: int, held: int, extra: int) -> int:
        if self.limit_bytes is None:
            return self.num_layers
        ends = range(start + 1, self.num_layers + 1)
        most = self.limit_bytes + extra
        return start + bisect_right(ends, most, key=lambda end: self.memory(start, end, held))


ChainKey = tuple[tuple[int, ...], tuple[int, ...]]
"""The hosts of a chain and its balance."""


class Chain(NamedTuple):
    """Hosts in the order of their stages.

    Attributes:
        hosts: their indices.
        balance: layers of each.
        ns: nanoseconds per step of the slowest part.
    """

    hosts: tuple[int, ...]
    balance: tuple[int, ...]
    ns: int

    @property
    def key(self) -> ChainKey:
        """What it is, however long it takes by what is known."""
        return self.hosts, self.balance


class Costs:
    """What a chain of these hosts may cost.

    Args:
        extra_bytes: memory that each host is assumed to have besides its own.
    """

    def __init__(
        self, hosts: Sequence[HostCosts], transfer: Transfer, held: Held, extra_bytes: int = 0
    ) -> None:
        self.hosts, self.transfer, self.held, self.extra_bytes = hosts, transfer, held, extra_bytes
        self.num_layers = hosts[0].num_layers
        self._busy: dict[tuple[int, int], list[int]] = {}

    def busy(self, one: int, other: int) -> list[int]:
        """Return how long a link is busy in its busier direction, for a stage's start at each."""
        if (one, other) not in self._busy:
            self._busy[one, other] = [
                max(self.transfer(one, other, start), self.transfer(other, one, start))
                for start in range(1, self.num_layers)
            ]
        return self._busy[one, other]

    def longest(self, order: Sequence[int]) -> int:
        """Return what no part of a chain in this order exceeds, unless a budget forbids it."""
        links = (ns for pair in pairwise(order) for ns in self.busy(*pair) if ns < UNLIMITED)
        return max(*(self.hosts[host].total_ns for host in order), *links, 0)


class Within:
    """What fits if no part takes longer than `most` nanoseconds.

    Sets of layers are integers: bit i is set if layer i is in it.
    """

    def __init__(self, costs: Costs, most: int) -> None:
        self.costs, self.most = costs, most
        self._lengths: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._linked: dict[tuple[int, int], int] = {}

    def starts(self, host: int, held: int, ends: int) -> int:
        """Return where a stage on this host can start to end at any of `ends`."""
        found = 0
        for length, starts in self._stretches(host, held):
            found |= _up_to(ends, length) & starts
        return found

    def linked(self, one: int, other: int) -> int:
        """Return the layers at which `other` can start if `one` has the stage before."""
        if (one, other) not in self._linked:
            busy = self.costs.busy(one, other)
            if max(busy, default=0) <= self.most:
                self._linked[one, other] = (1 << self.costs.num_layers) - 2
            else:
                bits = (1 << start for start, ns in enumerate(busy, start=1) if ns <= self.most)
                self._linked[one, other] = sum(bits)
        return self._linked[one, other]

    def starts_of(self, order: Sequence[int]) -> list[int]:
        """Return where each stage can start so that it and those after it take all layers left."""
        count, found = len(order), []
        ends = 1 << self.costs.num_layers
        for place in reversed(range(count)):
            held = self.costs.held(count, count - place)
            found.append(self.starts(order[place], held, ends))
            if place:
                ends = found[-1] & self.linked(order[place - 1], order[place])
        return found[::-1]

    def cut(self, order: Sequence[int]) -> Chain | None:
        """Return the most even cuts, by the smallest sum of squares; None if none fit."""
        starts, count = self.starts_of(order), len(order)
        if not starts[0] & 1:
            return None
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for place, host in enumerate(order):
            held, costs = self.costs.held(count, count - place), self.costs.hosts[host]
            last = place == count - 1
            allowed = 1 << self.costs.num_layers
            if not last:
                allowed = starts[place + 1] & self.linked(host, order[place + 1])
            lasts = self._lasts(host, held)
            longer: dict[int, tuple[int, tuple[int, ...]]] = {}
            for start, (before, balance) in best.items():
                for end in range(start + 1, lasts[start] + 1):
                    total = before + costs.ns(start, end) ** 2
                    if allowed >> end & 1 and (end not in longer or total < longer[end][0]):
                        longer[end] = (total, (*balance, end - start))
            best = longer
        _, balance = best[self.costs.num_layers]
        return Chain(tuple(order), balance, self._slowest(order, balance))

    def _slowest(self, order: Sequence[int], balance: Sequence[int]) -> int:
        ends = list(accumulate(balance))
        parts = zip(order, [0, *ends], ends, strict=False)
        links = zip(order, order[1:], ends, strict=False)
        return max(
            *(self.costs.hosts[host].ns(start, end) for host, start, end in parts),
            *(self.costs.busy(one, other)[start - 1] for one, other, start in links),
            0,
        )

    def _lasts(self, host: int, held: int) -> list[int]:
        """Return the last end of a stage on this host, from each start."""
        costs = self.costs.hosts[host]
        in_memory = costs.lasts_in_memory(held, self.costs.extra_bytes)
        return list(map(min, costs.lasts(self.most), in_memory))

    def _stretches(self, host: int, held: int) -> list[tuple[int, int]]:
        """Return the lengths of the longest stages on a host, each with the layers they start at.

        What reaches the last layer counts as longest: then there are few different lengths.
        """
        if (host, held) not in self._lengths:
            count, found = self.costs.num_layers, dict[int, int]()
            for start, end in enumerate(self._lasts(host, held)):
                length = count if end == count else end - start
                if length > 0:
                    found[length] = found.get(length, 0) | 1 << start
            self._lengths[host, held] = list(found.items())
        return self._lengths[host, held]


def _up_to(ends: int, length: int) -> int:
    """Return the layers that lie 1, 2, ... or `length` before any of `ends`."""
    found, width = ends >> 1, 1
    while width < length:
        more = min(width, length - width)
        found |= found >> more
        width += more
    return found


def _sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))
