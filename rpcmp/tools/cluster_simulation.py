"""Simulate a run on a cluster that need not exist, for `rpcmp plan --simulate`. Pure.

    cluster.toml ──> speeds of hosts ──> one step of 1F1B ──> faults ──> time that is work,
                     drawn by a seed     longest path         renewal    and what is in the way

A step is the longest path through its actions, all stages at once by numpy, so that 1,000 stages
with 4,000 micro-batches take seconds. Every host loses its stage at random, on average once in
`mtbf_hours`. A fault costs a recovery and the step that it interrupts, and may hit the recovery as
well: with a rate r of the whole cluster and R seconds for each, the share of time that is lost is
1 - exp(-r R), as in Daly's model of restarts (doi:10.1016/j.future.2004.11.016).

What rpcmp itself costs is measured with 4 to 64 stages (`python -m tests.benchmarks.cluster`) and
continued in proportion.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from rpcmp.config import loader
from rpcmp.config.files import read_bytes
from rpcmp.config.types import Positive, Size, Strict, format_size, parse_size
from rpcmp.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Milliseconds = Seconds
MoreThanZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

MOST_STAGES = 4096
MOST_ACTIONS = 50_000_000
"""Of a step, all stages together; it takes a minute and 1.6 GB."""


class Work(Strict):
    """One stage's work, on a host of the mean speed."""

    forward_ms: MoreThanZero
    """Milliseconds of the forward of one micro-batch."""
    backward_ms: MoreThanZero
    """Milliseconds of its backward, both gradients."""
    update_ms: Milliseconds = 0.0
    """Milliseconds of the optimizer, once a step."""
    activation: Size = "1 MiB"
    """Bytes to the next stage per micro-batch; its gradient takes as many."""
    state: Size = "1 GiB"
    """Bytes of parameters and optimizer state, which a neighbour gets a copy of after each step."""


class Hosts(Strict):
    """One host for each stage."""

    speed_spread: Share = 0.0
    """Standard deviation of the hosts' speeds, as a part of their mean."""
    jitter: Share = 0.0
    """Standard deviation of the time of each action, as a part of it."""
    mtbf_hours: MoreThanZero = 5000.0
    """Mean hours until a host fails."""


class LinkSpec(Strict):
    """The link between two neighbours."""

    bandwidth: Size = "1 GB"
    """Bytes per second, each way."""
    latency_ms: Milliseconds = 0.2


class Overheads(Strict):
    """What rpcmp itself takes, as measured with 4 to 64 stages on one machine with two cores."""

    message_ms: Milliseconds = 1.0
    """Milliseconds of a stage's time for the messages of each action."""
    recovery_s: Seconds = 0.1
    """Seconds from a fault until the run trains again, besides those for each stage."""
    recovery_s_per_stage: Seconds = 0.09
    """Seconds that each stage adds, where all of them share two cores: hosts need less."""
    driver_ms: Milliseconds = 0.35
    """Milliseconds of the driver's CPU per micro-batch, besides those for each stage."""
    driver_ms_per_stage: Milliseconds = 0.011
    """Milliseconds that each stage adds."""


class Cluster(Strict):
    """A cluster.toml."""

    stages: list[Annotated[int, Field(ge=1, le=MOST_STAGES)]] = Field(
        default=[10, 100, 1000], min_length=1
    )
    """Numbers of stages to simulate, each on as many hosts."""
    microbatches_per_stage: Positive = 4
    """Micro-batches of a step, for each stage of the pipeline."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the hosts' speeds and the jitter."""
    work: Work
    hosts: Hosts = Field(default_factory=Hosts)
    links: LinkSpec = Field(default_factory=LinkSpec)
    overheads: Overheads = Field(default_factory=Overheads)


def load(path: Path) -> Cluster:
    """Load a cluster.toml.

    Raises:
        ConfigError: it cannot be read, or has a wrong key or value.
    """
    try:
        data = tomllib.loads(read_bytes(path, loader.MAX_CONFIG).decode())
        cluster = Cluster.model_validate(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise loader.key_error(error, str(path), Cluster) from error
    except ValueError as error:  # of TOML and of UTF-8
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    most = max(cluster.stages)
    if (count := 2 * cluster.microbatches_per_stage * most**2) > MOST_ACTIONS:
        raise ConfigError(
            f"{path}: {most} stages with microbatches_per_stage = "
            f"{cluster.microbatches_per_stage} are {count:,} actions, more than the "
            f"{MOST_ACTIONS:,} that can be simulated; give fewer micro-batches"
        )
    return cluster


HEADS = (
    *("stages", "s a step", "computing", "faults a day", "s to recover", "lost to faults"),
    *("efficiency", "of a core: driver", "of a link: snapshots"),
)


@dataclass(frozen=True)
class Outlook:
    """A run with that many stages.

    Attributes:
        step_s: seconds of a step.
        busy: share of a step in which a stage computes, on average.
        faults_per_day: of all hosts together.
        recovery_s: seconds from a fault until the run trains again.
        lost: share of the time that faults take.
        efficiency: share of the time that all hosts together spend on work that counts.
        driver: the driver's CPU, as a share of one core.
        snapshots: bandwidth that copies of the state need, as a share of a link's.
        walls: what stands in the way, and what would move it.
    """

    stages: int
    step_s: float
    busy: float
    faults_per_day: float
    recovery_s: float
    lost: float
    efficiency: float
    driver: float
    snapshots: float
    walls: list[str]


def outlook(cluster: Cluster, stages: int) -> Outlook:
    """Simulate a run with that many stages."""
    count, costs = cluster.microbatches_per_stage * stages, cluster.overheads
    random = np.random.default_rng([cluster.seed, stages])
    slowness = 1 / np.maximum(random.normal(1.0, cluster.hosts.speed_spread, stages), 0.1)
    step, work = _step(cluster, slowness, count, random)
    busy = float(work.mean() / step)
    rate = stages / (cluster.hosts.mtbf_hours * 3600)
    recovery = costs.recovery_s + costs.recovery_s_per_stage * stages
    lost = -math.expm1(-rate * (recovery + step))
    driver = count * (costs.driver_ms + costs.driver_ms_per_stage * stages) / 1e3 / step
    copies = parse_size(cluster.work.state) / step / parse_size(cluster.links.bandwidth)
    found = Outlook(
        stages=stages,
        step_s=step,
        busy=busy,
        faults_per_day=rate * 86400,
        recovery_s=recovery,
        lost=lost,
        efficiency=busy * (1 - lost),
        driver=driver,
        snapshots=copies,
        walls=[],
    )
    found.walls.extend(_walls(cluster, found, float(slowness.max())))
    return found


def _walls(cluster: Cluster, found: Outlook, slowest: float) -> Iterator[str]:
    if found.driver > 0.5:
        yield (
            f"the driver takes {found.driver:.0%} of a core: more micro-batches a message, or "
            'samples that stages load by themselves (data.at = "stage")'
        )
    if found.snapshots > 0.5:
        yield (
            f"copies of {format_size(parse_size(cluster.work.state))} after each step take "
            f"{found.snapshots:.0%} of a link: more micro-batches a step"
        )
    if found.lost > 0.1:
        yield (
            f"faults take {found.lost:.0%} of the time: the group is formed anew for each, in "
            f"{found.recovery_s:.0f} s; forming only what was lost would not grow with the stages"
        )
    if slowest > 1.1:
        yield (
            f"the slowest host takes {slowest:.2f} times the mean: a balance by measured speeds "
            '(balance = "auto"), or leave it out'
        )
    transfer = parse_size(cluster.work.activation) / parse_size(cluster.links.bandwidth)
    if transfer * 1e3 > cluster.work.forward_ms:
        yield (
            f"an activation takes {transfer * 1e3:.1f} ms on its link, longer than its forward: "
            'cuts where less passes, or wire_dtype = "bfloat16"'
        )


def _step(
    cluster: Cluster,
    slowness: NDArray[np.float64],
    count: int,
    random: np.random.Generator,
) -> tuple[float, NDArray[np.float64]]:
    """Return the seconds of one step in the middle of a run, and those that each stage computes."""
    stages, work = len(slowness), cluster.work
    shape = (stages, count)
    varied = np.maximum(random.normal(1.0, cluster.hosts.jitter, (2, *shape)), 0.1)
    forwards, backwards = (
        mean / 1e3 * slowness[:, None] * each
        for mean, each in zip((work.forward_ms, work.backward_ms), varied, strict=True)
    )
    updates = work.update_ms / 1e3 * slowness
    message = cluster.overheads.message_ms / 1e3
    transfer = parse_size(work.activation) / parse_size(cluster.links.bandwidth)
    wire = cluster.links.latency_ms / 1e3 + transfer
    started, ended = one_f_one_b(forwards + message, backwards + message, wire)
    # A stage's next step may start as soon as it has updated, and a link carries all there is.
    step = max(float((ended - started + updates).max()), count * transfer)
    return step, forwards.sum(axis=1) + backwards.sum(axis=1) + updates


def one_f_one_b(
    forwards: NDArray[np.float64], backwards: NDArray[np.float64], wire: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each stage of a chain starts and ends a step of 1F1B (PipeDream-Flush).

    Stage s of n does n - s forwards, then a backward and a forward in turn. In a step in which all
    actions take one slot, each has a slot of its own at its stage, later than all that it waits
    for: in that order the longest path is found, all stages of a slot at once. Where times vary, a
    run's stages may choose another order; steps differ by at most a few percent.

    Args:
        forwards, backwards: (stages, micro-batches), seconds.
        wire: seconds from a stage to the next and back, each way.
    """
    stages, count = forwards.shape
    places = np.arange(stages)
    depths = np.minimum(stages - places, count)
    free, started = np.zeros(stages), np.zeros(stages)
    inputs = np.zeros((stages + 1, count))  # when they arrive; the batch's samples at 0
    gradients = np.zeros((stages + 1, count))  # those of the last outputs with the forward

    def run(
        rows: NDArray[np.intp], numbers: NDArray[np.intp], times: NDArray[np.float64], ready: Any
    ) -> NDArray[np.float64]:
        begin: NDArray[np.float64] = np.maximum(free[rows], ready)
        free[rows] = begin + times[rows, numbers]
        return begin

    for slot in range(2 * (stages + count) - 2):
        since = slot - places  # the stage's first forward
        is_warm = (since >= 0) & (since < depths)
        is_one = is_warm | ((since % 2 == 0) & (since >= 2 * depths) & (since < 2 * count))
        rows, numbers = places[is_one], np.where(is_warm, since, since // 2)[is_one]
        begin = run(rows, numbers, forwards, inputs[rows, numbers])
        inputs[rows + 1, numbers] = free[rows] + wire
        started[rows[numbers == 0]] = begin[numbers == 0]

        since = slot - (2 * stages - 1) + places  # its first backward
        is_one = (since % 2 == 0) & (since >= 0) & (since < 2 * count)
        rows, numbers = places[is_one], since[is_one] // 2
        run(rows, numbers, backwards, gradients[rows + 1, numbers])
        gradients[rows, numbers] = free[rows] + wire
    return started, free


def cells(found: Outlook) -> list[str]:
    """Return what stands below HEADS."""
    return [
        str(found.stages),
        f"{found.step_s:,.2f}",
        f"{found.busy:.1%}",
        f"{found.faults_per_day:.2f}",
        f"{found.recovery_s:.1f}",
        f"{found.lost:.2%}",
        f"{found.efficiency:.1%}",
        f"{found.driver:.1%}",
        f"{found.snapshots:.1%}",
    ]
