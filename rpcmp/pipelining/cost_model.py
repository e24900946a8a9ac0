"""Predict a step: the micro-batches in flight by the schedule, and time and memory by measurements.

Schedules count bundles: all micro-batches that travel in one message; see rpcmp.rpc.messages. The
times are a model's layers', measured on each host (`HostProfile`). Pure: no torch, so that
supervisors can predict the memory of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rpcmp.config.schema import Config
from rpcmp.config.topology import ReplicaAssignment
from rpcmp.errors import ConfigError
from rpcmp.pipelining import simulation
from rpcmp.pipelining.partition import StageHost, bounds
from rpcmp.pipelining.schedule import Action, InFlightLimits, policy
from rpcmp.pipelining.simulation import ActionTimes, SharedCores, Simulation, Wire, waits_for_cores

AHEAD = 2
"""Bundles that are requested beyond the stages' limits: their requests then lie at the first stage
before it has room for them, so that it never waits for one."""

STEPS_AHEAD = 2
"""Train steps in flight: the next one's requests arrive while the stages finish this one."""


def num_bundles(config: Config) -> int:
    return len(config.bundles(config.num_microbatches))


def _largest_bundle(config: Config) -> int:
    """Return the most micro-batches of a bundle in any mini-batch.

    A smaller mini-batch may have a larger one: with 8 at most, 11 are 1 3 3 3 1, 10 are 1 8 1.
    """
    return min(config.options.microbatches_per_message, config.num_microbatches)


def limits(config: Config) -> dict[str, InFlightLimits]:
    """Return the bundles that each stage may keep, by its name; see `simulation.limits`."""
    options = config.options
    chosen = policy(options.schedule)
    graph, most, count = config.graph(), options.max_in_flight, config.num_microbatches
    largest = _largest_bundle(config)
    simulation.limits(graph, chosen, count, most)  # for its errors, which speak of micro-batches
    if most is not None:
        if most < largest:
            raise ConfigError(
                f"max_in_flight = {most}, but a message has {largest} micro-batches by "
                f"microbatches_per_message = {options.microbatches_per_message}; give at least as "
                "many, better that times the number of stages"
            )
        all_bundles = num_bundles(config) if most >= count else 0
        most = max(most // largest, all_bundles)
    turns = {worker.stage: config.stage(worker.stage_index).turns for worker in config.workers}
    return simulation.limits(graph, chosen, num_bundles(config), most, turns)


def held(config: Config) -> dict[str, int]:
    """Return the most micro-batches between forward and weight gradient, by the stage's name."""
    return {
        name: min(each.held * _largest_bundle(config), config.num_microbatches)
        for name, each in limits(config).items()
    }


def hosts_under(config: Config, hosts: Sequence[StageHost]) -> list[StageHost]:
    """Return the hosts as they are under a job's options, which say what a stage holds."""
    most = held(config)
    return [
        host if host.held == most[host.stage] else replace(host, held=most[host.stage])
        for host in hosts
    ]


def in_flight(config: Config) -> int:
    """Return the most bundles in flight in the whole job."""
    return in_flight_per_replica(config) * _sink(config).num_replicas


def in_flight_per_replica(config: Config) -> int:
    """Return the most bundles in flight per replica of the sink; each replica runs its part."""
    sink = _sink(config)
    by_stage = limits(config)
    most = max(by_stage[worker.stage].open * worker.num_replicas for worker in config.workers)
    share = -(-most // sink.num_replicas)
    return min(share + AHEAD, STEPS_AHEAD * sink.largest_part(num_bundles(config)))


def _sink(config: Config) -> ReplicaAssignment:
    return config.turns_of(config.graph().sink)


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage.

    Attributes:
        busy_s: seconds per step in which it computes, or waits for a core.
        messages_s: seconds per step that messages take it besides; 0 if no steps were measured.
        bubble: share of a step in which it idles.
        limit_bytes: its memory limit; None: no limit.
    """

    num_layers: int
    busy_s: float
    messages_s: float
    bubble: float
    memory_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Prediction:
    """A balance and its predicted step.

    Attributes:
        step_s: seconds per step in the middle of a run.
        bubble: share of a step in which stages idle, on average.
        is_rehearsed: whether steps were measured, and not layers alone: only then it counts
            messages, shared cores, and the loading of data.
        loading_s: seconds for the samples of a step; 0 if no steps were measured.
        stages: by name, in order.
    """

    balance: list[int]
    step_s: float
    bubble: float
    is_rehearsed: bool
    loading_s: float
    stages: dict[str, StagePrediction]


def predict(
    config: Config,
    hosts: Sequence[StageHost],
    balance: list[int],
    times: Mapping[str, ActionTimes] | None = None,
    updates: Mapping[str, float] | None = None,
    message_s: float | None = None,
    loading_s: float = 0.0,
    shared: Sequence[SharedCores] = (),
) -> Prediction:
    """Predict a step that starts as soon as every stage has time for it.

    Args:
        times, updates, message_s, shared: see `step_seconds`; by default those of the layers as
            they were measured by themselves, and no messages.
        loading_s: seconds for the samples of a step, beside the step before.
    """
    times = times_of(hosts, balance) if times is None else times
    updates = updates_of(hosts, balance) if updates is None else updates
    step = step_seconds(config, times, updates, message_s or 0.0, shared=shared)
    step = max(step, loading_s)
    waited = waits_for_cores(shared)
    messages = 2 * num_bundles(config) * (message_s or 0.0)
    stages = {}
    for host, (start, end) in zip(hosts, bounds(balance), strict=True):
        busy = config.num_microbatches * times[host.stage].total + updates[host.stage]
        busy += waited.get(host.stage, 0.0)
        stages[host.stage] = StagePrediction(
            num_layers=end - start,
            busy_s=busy,
            messages_s=messages,
            bubble=max(0.0, 1.0 - (busy + messages) / step) if step else 0.0,
            memory_bytes=host.memory(start, end),
            limit_bytes=host.limit_bytes,
        )
    bubble = sum(stage.bubble for stage in stages.values()) / len(stages)
    return Prediction(balance, step, bubble, message_s is not None, loading_s, stages)


def updates_of(hosts: Sequence[StageHost], balance: Sequence[int]) -> dict[str, float]:
    """Return the seconds of each stage's optimizer, by the stage's name."""
    return {
        host.stage: sum(layer.update_s for layer in host.profile.layers[start:end])
        for host, (start, end) in zip(hosts, bounds(balance), strict=True)
    }


def times_of(hosts: Sequence[StageHost], balance: Sequence[int]) -> dict[str, ActionTimes]:
    """Return the times of one micro-batch, by the stage's name."""
    times = {}
    for host, (start, end) in zip(hosts, bounds(balance), strict=True):
        layers = host.profile.layers[start:end]
        forward = sum(layer.forward_s for layer in layers)
        backward = sum(layer.backward_s for layer in layers)
        besides = host.besides_s / (len(ActionTimes._fields) * host.num_microbatches)
        times[host.stage] = ActionTimes(
            forward + besides,
            backward + (forward if host.recompute else 0.0) + besides,
            sum(layer.weight_s for layer in layers) + besides,
        )
    return times


Wires = Mapping[tuple[str, str], Wire]
"""What one micro-batch takes from a stage to another, by their names; others take no time."""


def simulate(
    config: Config,
    times: Mapping[str, ActionTimes],
    message_s: float = 0.0,
    wires: Wires | None = None,
    shared: Sequence[SharedCores] = (),
) -> Simulation:
    """Simulate one step. The replicas of a stage count as one fast host; see `merge_profiles`.

    Args:
        times: per micro-batch and stage; the simulation runs bundles of micro-batches.
        message_s: what each forward or backward of a bundle takes besides, for its messages.
        wires: what a micro-batch takes between stages; None: no time.
        shared: the stages that share cores; `times` are without what they wait for these.
    """
    by_stage = limits(config)
    for worker in config.workers:
        if worker.replica == 0:
            of_one, count = by_stage[worker.stage], worker.num_replicas
            by_stage[worker.stage] = replace(
                of_one,
                open=of_one.open * count,
                held=of_one.held * count,
                deferred=of_one.deferred * count,
            )
    bundles = config.bundles(config.num_microbatches)
    per_microbatch = simulation.fixed(times, by_stage)

    def duration(stage: str, action: Action, bundle: int) -> float:
        message = 0.0 if action is Action.WEIGHT else message_s
        return len(bundles[bundle]) * per_microbatch(stage, action, bundle) + message

    def wire(stage: str, other: str, bundle: int) -> Wire:
        latency, seconds = (wires or {}).get((stage, other), (0.0, 0.0))
        return Wire(latency, len(bundles[bundle]) * seconds)

    return Simulation(
        *(config.graph(), policy(config.options.schedule), len(bundles), duration, by_stage),
        wires=None if wires is None else wire,
        shared=shared,
    )


def step_seconds(
    config: Config,
    times: Mapping[str, ActionTimes],
    updates: Mapping[str, float],
    message_s: float = 0.0,
    wires: Wires | None = None,
    shared: Sequence[SharedCores] = (),
) -> float:
    """Return the seconds from the start of one step to the start of the next.

    A step can start as soon as every stage will have stepped its optimizer when its first forward
    of the next step is due. If the driver has to look at all stages before they step, the next
    step starts only after all of them have finished.

    Args:
        times, message_s, wires, shared: see `simulate`.
        updates: seconds of each stage's optimizer.
    """
    run = simulate(config, times, message_s, wires, shared)
    if config.holds_steps:
        seconds = [run.makespan + max(updates.values())]
    else:
        seconds = [
            run.runs[stage][-1].end + update - run.runs[stage][0].start
            for stage, update in updates.items()
        ]
    for cores in shared:  # the next step overlaps this one, but needs the same cores
        busy = [each.end - each.start for stage in cores.waited for each in run.runs[stage]]
        busy += [updates[stage] for stage in cores.waited]
        seconds.append(sum(busy) / cores.number)
    return max(seconds)
