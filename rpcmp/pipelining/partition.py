"""Cut a list of layers into stages, by their sizes or by measurements on each host.

    layers   embedding block0 block1 block2 block3 head        balance = [2, 2, 2]
    stages   └── stage0 ────┘ └── stage1 ──┘ └─ stage2 ──┘

A balance is the number of consecutive layers of each stage. Without one, `balance_by_size` makes
the largest stage as small as possible (exact, by bisection on that size).

From measured layers (`HostProfile`), `choose_balance` makes the slowest stage as fast as possible,
among the balances that fit into every host's memory. It is exact, by dynamic programming over
(stage, layer): the best way to give the first `end` layers to the first stages follows from the
best ways to give fewer layers to one stage less.

    stage 0     stage 1
    [0, start)  [start, end)    best[end] = min over start of max(best[start], cost(stage 1))

Once the slowest stage is known, a second pass chooses the most even balance that is not slower, by
the smallest sum of squares. (One pass could not do both: a prefix with a slower stage may be the
more even one, and cost nothing if a later stage is slower still.)
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, TypeVar

from pydantic import Field

from rpcmp.config.schema import Config
from rpcmp.config.types import Strict, format_size
from rpcmp.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]


class ProfileOrder(Strict):
    """A request to measure all layers on a host, as one stage.

    Attributes:
        differentiates: whether a frozen layer has to compute input gradients nevertheless, for
            layers before it on other hosts.
    """

    config: Config
    differentiates: bool


class LayerProfile(Strict):
    """One layer on one host. Times and activations are per micro-batch.

    Attributes:
        forward_s, backward_s, weight_s: seconds of the forward, the input gradient and the weight
            gradient; the last layer's include the loss.
        update_s: seconds of the optimizer's step.
        state_bytes: parameters, buffers, gradients and optimizer state.
        snapshot_bytes: of these, what a snapshot has: all but the gradients.
        activation_bytes: saved tensors of the backward and the output, without the input.
        input_bytes: the layer's input.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    update_s: Seconds
    state_bytes: Bytes
    activation_bytes: Bytes
    input_bytes: Bytes
    snapshot_bytes: Bytes = 0

    def scaled(self, factor: float) -> LayerProfile:
        """Return the layer on a host that takes `factor` times as long."""
        times = ("forward_s", "backward_s", "weight_s", "update_s")
        return self.model_copy(update={key: factor * getattr(self, key) for key in times})


class HostProfile(Strict):
    """All layers on one host.

    Attributes:
        base_bytes: a worker's memory without layers.
        available_bytes: the device's memory for all workers together; None if unknown.
        num_devices: how many such devices the host has; one if it is the CPU.
    """

    layers: list[LayerProfile] = Field(min_length=1)
    base_bytes: Bytes
    available_bytes: Bytes | None
    num_devices: int = 1

    def scaled(self, factor: float) -> HostProfile:
        """Return the profile of a host that takes `factor` times as long for every layer."""
        return self.model_copy(update={"layers": [layer.scaled(factor) for layer in self.layers]})


def merge_profiles(replicas: Sequence[HostProfile], shares: Sequence[float]) -> HostProfile:
    """Merge the hosts of a stage's replicas into one that is as slow as the slowest of them.

    Each replica steps its own optimizer, and holds the whole stage in memory.

    Args:
        shares: each one's share of a step's micro-batches; together 1.
    """
    last, share = max(
        zip(replicas, shares, strict=True), key=lambda each: each[1] * profile_seconds(each[0])
    )
    layers = [
        LayerProfile(
            forward_s=share * slowest.forward_s,
            backward_s=share * slowest.backward_s,
            weight_s=share * slowest.weight_s,
            update_s=max(layer.update_s for layer in each),
            state_bytes=max(layer.state_bytes for layer in each),
            snapshot_bytes=max(layer.snapshot_bytes for layer in each),
            activation_bytes=max(layer.activation_bytes for layer in each),
            input_bytes=max(layer.input_bytes for layer in each),
        )
        for slowest, *each in zip(last.layers, *(host.layers for host in replicas), strict=True)
    ]
    available = [host.available_bytes for host in replicas if host.available_bytes is not None]
    return HostProfile(
        layers=layers,
        base_bytes=max(host.base_bytes for host in replicas),
        available_bytes=min(available, default=None),
    )


def profile_seconds(host: HostProfile) -> float:
    return sum(layer.forward_s + layer.backward_s + layer.weight_s for layer in host.layers)


def cut_layers(layers: Sequence[str], balance: Sequence[int]) -> list[list[str]]:
    """Return the names of the layers of each stage."""
    if sum(balance) != len(layers):
        raise ConfigError(
            f"balance = {list(balance)} adds up to {sum(balance)}, but the model has "
            f"{len(layers)} layers: {', '.join(layers)}"
        )
    return [list(layers[start:end]) for start, end in bounds(balance)]


def bounds(balance: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and the one behind its last."""
    ends = list(accumulate(balance))
    return list(zip([0, *ends], ends, strict=False))


def balance_by_size(sizes: Sequence[int], num_stages: int) -> list[int]:
    """Return the balance whose largest stage is smallest; `sizes` are at least zero."""
    if num_stages > len(sizes):
        raise ConfigError(
            f"{num_stages} stages need at least as many layers, but the model has {len(sizes)}"
        )
    capacities = range(max(sizes), sum(sizes) + 1)
    smallest = bisect_left(
        capacities, True, key=lambda capacity: len(_fill(sizes, capacity)) <= num_stages
    )
    return _spread(_fill(sizes, capacities[smallest]), num_stages)


def _fill(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the layers per stage if every stage takes all that fit into `capacity`."""
    counts, load = [0], 0
    for size in sizes:
        if counts[-1] and load + size > capacity:
            counts.append(0)
            load = 0
        counts[-1] += 1
        load += size
    return counts


def _spread(counts: list[int], num_stages: int) -> list[int]:
    """Split stages of several layers until there are `num_stages`; no stage becomes larger."""
    while len(counts) < num_stages:
        index = max(range(len(counts)), key=counts.__getitem__)
        half = counts[index] // 2
        counts[index : index + 1] = [counts[index] - half, half]
    return counts


Number = TypeVar("Number", int, float)

Cost = Callable[[int, int, int], float]
"""Cost of the layers from `start` up to `end` at a stage; infinite if they do not fit."""


@dataclass(frozen=True)
class StageHost:
    """One stage's host, and the cost of any part of the model there.

    Attributes:
        profile: the layers, measured on that host.
        limit_bytes: memory limit of the stage; None: no limit.
        num_microbatches: per step.
        held: micro-batches whose activations the stage may hold at once.
        recompute: whether it holds only its inputs and recomputes activations.
        besides_s: seconds per step that it computes besides its layers, whichever they are.
    """

    stage: str
    profile: HostProfile
    limit_bytes: int | None
    num_microbatches: int
    held: int
    recompute: bool = False
    besides_s: float = 0.0

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds of one step in the layers from `start` up to `end`."""
        return self._seconds[start][end - start - 1] + self.besides_s

    def memory(self, start: int, end: int) -> int:
        """Return the bytes that the layers from `start` up to `end` need."""
        received = self.profile.layers[start].input_bytes
        kept = self._bytes[start][end - start - 1]
        return self.profile.base_bytes + self.held * received + kept

    def overrun(self, start: int, end: int) -> int:
        """Return the bytes by which these layers exceed the limit; at most zero if they fit."""
        return 0 if self.limit_bytes is None else self.memory(start, end) - self.limit_bytes

    @cached_property
    def _seconds(self) -> list[list[float]]:
        return _running_sums([self._step_seconds(layer) for layer in self.profile.layers])

    @cached_property
    def _bytes(self) -> list[list[int]]:
        activations = 1 if self.recompute else self.held
        layers = self.profile.layers
        return _running_sums(
            [layer.state_bytes + activations * layer.activation_bytes for layer in layers]
        )

    def _step_seconds(self, layer: LayerProfile) -> float:
        forwards = 2 if self.recompute else 1
        microbatch = forwards * layer.forward_s + layer.backward_s + layer.weight_s
        return self.num_microbatches * microbatch + layer.update_s


def choose_balance(hosts: Sequence[StageHost]) -> list[int]:
    """Return the layers of each stage; `hosts` are in order and have profiled the same layers."""
    num_layers = len(hosts[0].profile.layers)
    if len(hosts) > num_layers:
        raise ConfigError(
            f"{len(hosts)} stages need at least as many layers, but the model has {num_layers}"
        )

    def seconds(stage: int, start: int, end: int) -> float:
        fits = hosts[stage].overrun(start, end) <= 0
        return hosts[stage].seconds(start, end) if fits else math.inf

    slowest = _best(seconds, len(hosts), num_layers, max)
    if slowest is None:
        raise _too_large(hosts, num_layers)
    limit, _ = slowest

    def unevenness(stage: int, start: int, end: int) -> float:
        busy = seconds(stage, start, end)
        return busy**2 if busy <= limit else math.inf

    even = _best(unevenness, len(hosts), num_layers, operator.add)
    _, balance = slowest if even is None else even
    return list(balance)


def _best(
    cost: Cost, num_stages: int, num_layers: int, combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]] | None:
    """Return the smallest combined cost and its balance; None if all are infinite."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (-math.inf, ())}
    for stage in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, balance) in best.items():
            for end in range(start + 1, num_layers + 1):
                own = cost(stage, start, end)
                total = combine(before, own) if stage else own
                if total < longer.get(end, (math.inf,))[0]:
                    longer[end] = (total, (*balance, end - start))
        best = longer
    return best.get(num_layers)


def _too_large(hosts: Sequence[StageHost], num_layers: int) -> ConfigError:
    """Return an error that names the stage that lacks most in the balance that lacks least."""

    def overrun(stage: int, start: int, end: int) -> float:
        return hosts[stage].overrun(start, end)

    nearest = _best(overrun, len(hosts), num_layers, max)
    if nearest is None:
        raise AssertionError("there is a balance, though none that fits")
    parts = zip(hosts, bounds(nearest[1]), strict=True)
    host, (start, end) = max(parts, key=lambda part: part[0].overrun(*part[1]))
    return ConfigError(
        f"no balance fits into memory; with {list(nearest[1])}, which comes nearest, stage "
        f"{host.stage!r} needs {format_size(host.memory(start, end))} and may have "
        f"{format_size(host.limit_bytes or 0)}; take more stages, smaller micro-batches, a smaller "
        "max_in_flight, or raise its `memory`"
    )


def _running_sums(values: Sequence[Number]) -> list[list[Number]]:
    """For each start, the sums of 1, 2, 3... values from there on.

    Equal values give equal sums wherever they begin, which differences of prefix sums do not.
    """
    return [list(accumulate(values[start:])) for start in range(len(values))]
