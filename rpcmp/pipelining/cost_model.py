"""Predict the time and memory of a step with a balance, from the measured times of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rpcmp.config.schema import Config
from rpcmp.pipelining import simulation
from rpcmp.pipelining.inflight import limits, num_bundles
from rpcmp.pipelining.partition import StageHost
from rpcmp.pipelining.schedule import InFlightLimits, policy
from rpcmp.pipelining.simulation import ActionTimes, Simulation


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage.

    Attributes:
        busy_s: seconds per step in which it computes.
        bubble: share of a step in which it idles.
        limit_bytes: its memory limit; None: no limit.
    """

    num_layers: int
    busy_s: float
    bubble: float
    memory_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Prediction:
    """A balance and its predicted step.

    Attributes:
        step_s: seconds per step in the middle of a run, without transfers and data loading.
        bubble: share of a step in which stages idle, on average.
        stages: by name, in order.
    """

    balance: list[int]
    step_s: float
    bubble: float
    stages: dict[str, StagePrediction]


def predict(config: Config, hosts: Sequence[StageHost], balance: list[int]) -> Prediction:
    """Predict a step that starts as soon as every stage has time for it."""
    parts = _parts(hosts, balance)
    step = _step_seconds(config, parts)
    stages = {
        host.stage: StagePrediction(
            num_layers=end - start,
            busy_s=(busy := host.seconds(start, end)),
            bubble=max(0.0, 1.0 - busy / step) if step else 0.0,
            memory_bytes=host.memory(start, end),
            limit_bytes=host.limit_bytes,
        )
        for host, start, end in parts
    }
    bubble = sum(stage.bubble for stage in stages.values()) / len(stages)
    return Prediction(balance, step, bubble, stages)


def times_of(hosts: Sequence[StageHost], balance: Sequence[int]) -> dict[str, ActionTimes]:
    """Return the times of one micro-batch, by the stage's name."""
    return {host.stage: _times(host, start, end) for host, start, end in _parts(hosts, balance)}


def simulate(config: Config, times: Mapping[str, ActionTimes]) -> Simulation:
    """Simulate one step. The replicas of a stage count as one host; see `merge_profiles`.

    Args:
        times: per micro-batch and stage; the simulation runs bundles of micro-batches.
    """
    kept = {
        worker.stage: _times_over(each, worker.num_replicas)
        for worker in config.workers
        for each in [limits(config)[worker.stage]]
    }
    bundles = num_bundles(config)
    a_bundle = {
        stage: each.scaled(config.num_microbatches / bundles) for stage, each in times.items()
    }
    return Simulation(
        config.graph(),
        policy(config.schedule),
        bundles,
        simulation.fixed(a_bundle, kept),
        kept,
    )


def _parts(hosts: Sequence[StageHost], balance: Sequence[int]) -> list[tuple[StageHost, int, int]]:
    ends = list(accumulate(balance))
    return list(zip(hosts, [0, *ends], ends, strict=False))


def _step_seconds(config: Config, parts: Sequence[tuple[StageHost, int, int]]) -> float:
    """Return the seconds from the start of one step to the start of the next.

    A step can start as soon as every stage will have stepped its optimizer when its first forward
    of the next step is due. If the driver has to look at all stages before they step, the next
    step starts only after all of them have finished.
    """
    run = simulate(config, {host.stage: _times(host, start, end) for host, start, end in parts})
    updates = {
        host.stage: sum(layer.update_s for layer in host.profile.layers[start:end])
        for host, start, end in parts
    }
    if config.holds_steps:
        return run.makespan + max(updates.values())
    return max(
        run.runs[stage][-1].end + update - run.runs[stage][0].start
        for stage, update in updates.items()
    )


def _times_over(limits: InFlightLimits, replicas: int) -> InFlightLimits:
    """Return the limits of a stage's replicas together, which count as one fast host."""
    return replace(
        limits,
        open=limits.open * replicas,
        held=limits.held * replicas,
        deferred=limits.deferred * replicas,
    )


def _times(host: StageHost, start: int, end: int) -> ActionTimes:
    layers = host.profile.layers[start:end]
    forward = sum(layer.forward_s for layer in layers)
    return ActionTimes(
        forward,
        sum(layer.backward_s for layer in layers) + (forward if host.recompute else 0.0),
        sum(layer.weight_s for layer in layers),
    )
