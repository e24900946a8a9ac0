"""Simulate a step of any graph under any schedule: its duration, and where stages wait.

The rules are a run's: a stage's thread does one action at a time and asks its policy for the
next; a forward needs its inputs' forwards, a backward the forward and its readers' backwards, and
both take time on the wire. Where stages share too few cores, an action waits until one is free,
first come, first served; a kernel gives them turns instead, and is done with all about as late.
`balance = "auto"` predicts with it, and the tests draw every schedule with it. Pure: no torch, no
processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcmp.config.topology import Graph, ReplicaAssignment
from rpcmp.pipelining.schedule import Action, InFlightLimits, Policy, RoundProgress, StagePosition

Duration = Callable[[str, Action, int], float]
"""Seconds that a stage's action takes for one micro-batch."""


class ActionTimes(NamedTuple):
    """Seconds that a stage computes for one micro-batch; `backward` is the input gradient alone."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return sum(self)

    def scaled(self, number: float) -> ActionTimes:
        return ActionTimes(*(number * seconds for seconds in self))


class Wire(NamedTuple):
    """What a message takes from one stage to another.

    Attributes:
        latency: seconds until its first byte arrives.
        seconds: how long it keeps the link busy, which carries one message after the other.
    """

    latency: float
    seconds: float = 0.0


WireOf = Callable[[str, str, int], Wire]
"""What a micro-batch takes from a stage to another: activations, or gradients on the way back."""


class SharedCores(NamedTuple):
    """The cores of a host that computes more stages than it has cores.

    Attributes:
        number: of cores.
        waited: seconds per step for which each of these stages has waited for a core, as measured.
    """

    number: int
    waited: Mapping[str, float]


def waits_for_cores(shared: Sequence[SharedCores]) -> dict[str, float]:
    """Return for how long stages have waited for a core, by their names."""
    return {stage: seconds for cores in shared for stage, seconds in cores.waited.items()}


class SimulatedRun(NamedTuple):
    action: Action
    microbatch: int
    start: float
    end: float


def fixed(times: Mapping[str, ActionTimes], limits: Mapping[str, InFlightLimits]) -> Duration:
    """Return durations that are equal for all micro-batches; stages that do not split have whole
    backwards."""

    def duration(stage: str, action: Action, microbatch: int) -> float:
        seconds = times[stage]
        match action:
            case Action.FORWARD:
                return seconds.forward
            case Action.BACKWARD:
                return seconds.backward + (0.0 if limits[stage].splits else seconds.weight)
            case Action.WEIGHT:
                return seconds.weight

    return duration


def depths(graph: Graph, replicas: Mapping[str, int]) -> dict[str, int]:
    """Return the micro-batches each stage needs so that every worker from it to the loss has one.

    Args:
        replicas: number of replicas of the stages that have several; each needs as many.
    """

    def count(stage: str) -> int:
        return replicas.get(stage, 1)

    return {stage: -(-depth // count(stage)) for stage, depth in graph.depths(count).items()}


def limits(
    graph: Graph,
    policy: Policy,
    num_microbatches: int,
    max_in_flight: int | None = None,
    turns: Mapping[str, ReplicaAssignment] | None = None,
) -> dict[str, InFlightLimits]:
    """Return the limits of each stage, or of each of its replicas, by the stage's name.

    Args:
        policy, num_microbatches, max_in_flight: see `Policy.limits`.
        turns: the assignment of every stage that has replicas.
    """
    turns = turns or {}
    replicas = {stage: each.num_replicas for stage, each in turns.items()}
    by_depth = depths(graph, replicas)
    deepest = max(by_depth.values())
    result = {}
    for stage, depth in by_depth.items():
        reads_stages = any(not reference.from_batch for reference in graph.inputs[stage])
        position = StagePosition(depth, deepest, reads_stages)
        own = turns[stage].largest_part(num_microbatches) if stage in turns else num_microbatches
        result[stage] = policy.limits(position, own, max_in_flight)
    return result


@dataclass
class Simulation:
    """One step on all stages.

    Args:
        duration: seconds per action.
        limits: by stage; see `limits`.
        latency: seconds on the wire, each way.
        wires: instead of `latency`; the two directions of a link do not share it.
        shared: the stages that share cores; others have one each.

    Attributes:
        runs: the actions of each stage, in order.

    Raises:
        RuntimeError: the schedule deadlocks.
    """

    graph: Graph
    policy: Policy
    num_microbatches: int
    duration: Duration
    limits: Mapping[str, InFlightLimits]
    latency: float = 0.0
    wires: WireOf | None = None
    shared: Sequence[SharedCores] = ()
    runs: dict[str, list[SimulatedRun]] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = {stage: [] for stage in self.graph.stages}
        self._readers = {
            stage: {port.reader for port in self.graph.ports(stage)} for stage in self.graph.stages
        }
        self._producers = {
            stage: {ref.producer for ref in self.graph.inputs[stage] if not ref.from_batch}
            for stage in self.graph.stages
        }
        places = {stage: place for place, stage in enumerate(self.graph.stages)}
        others = {Action.FORWARD: self._readers, Action.BACKWARD: self._producers}
        self._wakes = {
            action: [
                [places[other] for other in others.get(action, {}).get(stage, ())]
                for stage in self.graph.stages
            ]
            for action in Action
        }
        self._arrives: dict[tuple[str, str, Action, int], float] = {}
        self._sent: dict[tuple[str, str], float] = {}  # when each link is free again
        self._done = {(stage, action): 0 for stage in self.graph.stages for action in Action}
        self._cores: dict[str, list[float]] = {}  # a heap: when each of a stage's cores is free
        for cores in self.shared:
            self._cores |= dict.fromkeys(cores.waited, [0.0] * cores.number)
        self._queued: dict[int, float] = {}  # since when a place waits for a core
        self._run()

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max(self._free(stage) for stage in self.graph.stages)

    def _run(self) -> None:
        kinds = sum(3 if limits.splits else 2 for limits in self.limits.values())
        left = kinds * self.num_microbatches
        # A heap, as it is sorted: when to look at a place, and since when that has been due.
        looks = [(0.0, 0.0, place) for place in range(len(self.graph.stages))]
        while left:
            if not looks:
                raise RuntimeError(f"the schedule deadlocks after {self.runs}")
            now, since, place = heapq.heappop(looks)
            stage = self.graph.stages[place]
            if self._free(stage) > now or self._queued.get(place, since) != since:
                continue  # it is looked at when it is free
            self._queued.pop(place, None)
            if (free := self._cores.get(stage, [now])[0]) > now:
                if self._next(stage, now) is not None:
                    self._queued[place] = since
                    heapq.heappush(looks, (free, since, place))
                continue
            if (run := self._start(stage, now)) is not None:
                left -= 1
                heapq.heappush(looks, (run.end, run.end, place))
                for other in self._wakes[run.action][place]:
                    arrives = self._send(run, stage, other)
                    heapq.heappush(looks, (arrives, arrives, other))

    def _start(self, stage: str, now: float) -> SimulatedRun | None:
        """Start the next action of a free stage, and return it, or None if the stage waits."""
        if (action := self._next(stage, now)) is None:
            return None
        microbatch = self._done[stage, action]
        end = now + self.duration(stage, action, microbatch)
        run = SimulatedRun(action, microbatch, now, end)
        self.runs[stage].append(run)
        if (cores := self._cores.get(stage)) is not None:
            heapq.heapreplace(cores, end)
        self._done[stage, action] += 1
        if action is Action.BACKWARD and not self.limits[stage].splits:
            self._done[stage, Action.WEIGHT] += 1
        return run

    def _next(self, stage: str, now: float) -> Action | None:
        return self.policy.choose(self._progress(stage, now), self.limits[stage])

    def _progress(self, stage: str, now: float) -> RoundProgress:
        forwards, backwards, weights = (self._done[stage, action] for action in Action)
        return RoundProgress(
            self.num_microbatches,
            forwards,
            backwards,
            weights,
            forwards < self.num_microbatches
            and self._have_arrived(self._producers[stage], stage, Action.FORWARD, forwards, now),
            backwards < forwards
            and self._have_arrived(self._readers[stage], stage, Action.BACKWARD, backwards, now),
        )

    def _send(self, run: SimulatedRun, stage: str, place: int) -> float:
        """Send what a run has computed to the stage at `place`; returns when it arrives."""
        other = self.graph.stages[place]
        wire = self.wires(stage, other, run.microbatch) if self.wires else Wire(self.latency)
        sent = max(run.end, self._sent.get((stage, other), 0.0)) + wire.seconds
        self._sent[stage, other] = sent
        self._arrives[stage, other, run.action, run.microbatch] = sent + wire.latency
        return sent + wire.latency

    def _have_arrived(
        self, stages: set[str], at: str, action: Action, microbatch: int, now: float
    ) -> bool:
        found = (self._arrives.get((stage, at, action, microbatch)) for stage in stages)
        return all(arrives is not None and arrives <= now for arrives in found)

    def _free(self, stage: str) -> float:
        runs = self.runs[stage]
        return runs[-1].end if runs else 0.0
