"""What a plan of a job is made from, and what it says; see `rpcmp.pipelining.planner`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.pipelining.partition import HostProfile


@dataclass(frozen=True)
class PlanHost:
    """A host that may serve a stage.

    Attributes:
        profile: of all layers, measured there.
        limit_bytes: memory that its worker may use; None: no limit.
        besides_s: seconds per step that a stage computes there besides its layers.
    """

    address: str
    profile: HostProfile
    limit_bytes: int | None = None
    besides_s: float = 0.0


@dataclass(frozen=True)
class Connection:
    """The way from one host to another.

    Attributes:
        latency_s: seconds until the first byte arrives.
        bytes_per_s: infinite if they share memory.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf


Pair = tuple[str, str]
"""Two addresses; the sender's first."""


@dataclass(frozen=True)
class Constraints:
    """What a plan has to keep to.

    Attributes:
        required: addresses of hosts that take part in any case.
        budgets: the most bytes per step between two hosts, both ways together.
    """

    required: frozenset[str] = frozenset()
    budgets: Mapping[frozenset[str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
        layers: the first one's number, and the one behind the last.
        busy_s: seconds per step in which it computes.
    """

    address: str
    layers: tuple[int, int]
    busy_s: float
    memory_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class PlannedLink:
    """What passes between two neighbours of a plan in a step, activations and gradients together.

    Attributes:
        busy_s: seconds per step in which the link carries them, in its slower direction.
    """

    one: str
    other: str
    step_bytes: int
    busy_s: float


@dataclass(frozen=True)
class HostLoss:
    """What losing a host costs.

    Attributes:
        spare: the address of the host that takes over; None: the run waits for it to come back.
        step_s: seconds per step from then on; without a spare, if it is planned again without the
            host. None: the other hosts cannot train the model.
    """

    address: str
    spare: str | None
    step_s: float | None


@dataclass(frozen=True)
class Plan:
    """Who serves what, and how long a step takes.

    Attributes:
        spares: addresses of hosts that stand by, in the order in which they take over.
        unused: addresses of hosts that could take over no stage.
        options: the fastest of those that the run may try; it starts with the config's own.
        step_s: seconds per step under these.
        bubble: share of a step in which stages idle, on average.
        is_rehearsed: whether `step_s` was measured; if not, it is predicted.
    """

    stages: list[PlannedStage]
    links: list[PlannedLink]
    spares: list[str]
    unused: list[str]
    options: ScheduleOptions
    step_s: float
    bubble: float
    losses: list[HostLoss]
    is_rehearsed: bool = False

    @property
    def balance(self) -> list[int]:
        return [end - start for start, end in (stage.layers for stage in self.stages)]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; times in seconds, memory in bytes."""
        return {**asdict(self), "options": self.options.model_dump(), "balance": self.balance}
