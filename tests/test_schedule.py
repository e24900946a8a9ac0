"""Schedules, simulated: the pictures of rpcmp.schedule, and that nothing ever deadlocks.

The simulation follows the rules of a run: a stage's thread does one action at a time and asks its
policy for the next; a forward needs its inputs' forwards, a backward the forward and its readers'
backwards; the driver asks for a few micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp import graph, schedule
from rpcmp.errors import ConfigError
from rpcmp.graph import Graph
from rpcmp.schedule import Action, Progress

AHEAD = 2  # rpcmp.driver.group.AHEAD, which needs torch
F, B = Action.FORWARD, Action.BACKWARD

Duration = Callable[[str, Action, int], int]


@dataclass
class Simulation:
    """One mini-batch on all stages.

    Attributes:
        runs: for every action of a stage, when it starts and ends.
    """

    graph: Graph
    policy: schedule.Policy
    num_microbatches: int
    duration: Duration = lambda stage, action, microbatch: 1
    now: int = 0
    runs: dict[tuple[str, Action, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = self.graph.stages
        self.limits = {
            stage: self.policy.limit(self.graph.depth(stage), self.num_microbatches)
            for stage in stages
        }
        while len(self.runs) < 2 * len(stages) * self.num_microbatches:
            started = [self._start(stage) for stage in stages if not self._is_busy(stage)]
            later = [end for _, end in self.runs.values() if end > self.now]
            assert any(started) or later, f"deadlock at {self.now}: {self.runs}"
            self.now = min(later)

    def count(self, stage: str, action: Action) -> int:
        """How many actions of a kind a stage has begun."""
        return sum(key[:2] == (stage, action) for key in self.runs)

    def order(self, stage: str) -> list[tuple[Action, int]]:
        """A stage's actions in the order in which they ran."""
        keys = sorted(self.runs, key=self.runs.__getitem__)
        return [(action, microbatch) for name, action, microbatch in keys if name == stage]

    def open(self, stage: str) -> int:
        """The most micro-batches that a stage ever held between forward and backward."""
        held = most = 0
        for action, _ in self.order(stage):
            held += 1 if action is F else -1
            most = max(most, held)
        return most

    def picture(self) -> str:
        """The stages' actions over time, for actions that take one unit each."""
        rows = []
        for index, stage in enumerate(self.graph.stages):
            cells = {
                start: f"{action}{microbatch}"
                for (name, action, microbatch), (start, _) in self.runs.items()
                if name == stage
            }
            row = " ".join(f"{cells.get(time, '.'):2}" for time in range(self.now))
            rows.append(f"stage {index}   {row}".rstrip())
        return "\n".join(rows)

    def _start(self, stage: str) -> bool:
        forwards, backwards = self.count(stage, F), self.count(stage, B)
        progress = Progress(
            self.num_microbatches,
            forwards,
            backwards,
            forwards < self.num_microbatches and self._can_forward(stage, forwards),
            backwards < self.num_microbatches and self._can_backward(stage, backwards),
        )
        action = self.policy.choose(progress, self.limits[stage])
        if action is None:
            return False
        assert progress.forward_ready if action is F else progress.backward_ready
        microbatch = forwards if action is F else backwards
        end = self.now + self.duration(stage, action, microbatch)
        self.runs[stage, action, microbatch] = (self.now, end)
        return True

    def _is_busy(self, stage: str) -> bool:
        return any(name == stage and end > self.now for (name, _, _), (_, end) in self.runs.items())

    def _is_done(self, stage: str, action: Action, microbatch: int) -> bool:
        run = self.runs.get((stage, action, microbatch))
        return run is not None and run[1] <= self.now

    def _can_forward(self, stage: str, microbatch: int) -> bool:
        references = self.graph.inputs[stage]
        return self._is_asked(microbatch) and all(
            ref.from_batch or self._is_done(ref.producer, F, microbatch) for ref in references
        )

    def _can_backward(self, stage: str, microbatch: int) -> bool:
        readers = {port.reader for port in self.graph.ports(stage)}
        return self._is_done(stage, F, microbatch) and all(
            self._is_done(reader, B, microbatch) for reader in readers
        )

    def _is_asked(self, microbatch: int) -> bool:
        in_flight = max(self.limits.values()) + AHEAD
        return all(
            self._is_done(stage, B, earlier)
            for stage in self.graph.stages
            for earlier in range(microbatch - in_flight + 1)
        )


def simulate(name: str, num_stages: int, num_microbatches: int) -> Simulation:
    """A chain under the schedule called `name`, with equal times for all actions."""
    stages = [f"stage{index}" for index in range(num_stages)]
    return Simulation(graph.chain(stages), schedule.policy(name), num_microbatches)


PICTURES = {
    ("gpipe", 3, 4): """\
stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .""",
    ("1f1b", 3, 4): """\
stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .""",
    ("gpipe", 2, 3): """\
stage 0   F0 F1 F2 .  .  B0 B1 B2
stage 1   .  F0 F1 F2 B0 B1 B2 .""",
    ("1f1b", 2, 3): """\
stage 0   F0 F1 .  B0 F2 B1 .  B2
stage 1   .  F0 B0 F1 B1 F2 B2 .""",
    ("gpipe", 1, 3): "stage 0   F0 F1 F2 B0 B1 B2",
    ("1f1b", 1, 3): "stage 0   F0 B0 F1 B1 F2 B2",
    # Fewer micro-batches than stages: both are the same but for the last stages.
    ("gpipe", 4, 2): """\
stage 0   F0 F1 .  .  .  .  .  .  B0 B1
stage 1   .  F0 F1 .  .  .  .  B0 B1 .
stage 2   .  .  F0 F1 .  .  B0 B1 .  .
stage 3   .  .  .  F0 F1 B0 B1 .  .  .""",
    ("1f1b", 4, 2): """\
stage 0   F0 F1 .  .  .  .  .  B0 .  B1
stage 1   .  F0 F1 .  .  .  B0 .  B1 .
stage 2   .  .  F0 F1 .  B0 .  B1 .  .
stage 3   .  .  .  F0 B0 F1 B1 .  .  .""",
}


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches"), PICTURES)
def test_a_chain_runs_as_drawn(name: str, num_stages: int, num_microbatches: int) -> None:
    drawn = PICTURES[name, num_stages, num_microbatches]
    assert simulate(name, num_stages, num_microbatches).picture() == drawn


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_module_draws_the_same_pictures(name: str) -> None:
    lines = [line.strip() for line in (schedule.__doc__ or "").splitlines()]
    for row in PICTURES[name, 3, 4].splitlines():
        assert row in lines


@pytest.mark.parametrize("name", schedule.POLICIES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_with_equal_times_only_filling_and_draining_costs_time(
    name: str, num_stages: int, num_microbatches: int
) -> None:
    run = simulate(name, num_stages, num_microbatches)
    assert run.now == 2 * (num_microbatches + num_stages - 1)


def test_gpipe_holds_everything_and_1f1b_only_its_depth() -> None:
    gpipe, one_f_one_b = simulate("gpipe", 3, 8), simulate("1f1b", 3, 8)
    assert [gpipe.open(stage) for stage in gpipe.graph.stages] == [8, 8, 8]
    assert [one_f_one_b.open(stage) for stage in one_f_one_b.graph.stages] == [3, 2, 1]


def test_gpipe_waits_for_the_last_forward_even_where_it_could_go_on() -> None:
    run = Simulation(
        graph.chain(["slow", "fast"]),
        schedule.policy("gpipe"),
        num_microbatches=3,
        duration=lambda stage, action, microbatch: 5 if stage == "slow" else 1,
    )
    assert [action for action, _ in run.order("fast")] == [F, F, F, B, B, B]


def test_nobody_holds_more_micro_batches_than_there_are() -> None:
    assert schedule.policy("1f1b").limit(depth=5, num_microbatches=2) == 2


def test_an_unknown_schedule_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="no schedule 'interleaved'; there are 'gpipe', '1f1b'"):
        schedule.policy("interleaved")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any stages that read earlier ones; the last reads all that would be left unread."""
    count = draw(st.integers(1, 6))
    inputs: dict[str, list[str]] = {}
    for index in range(count):
        earlier = draw(st.sets(st.integers(0, index - 1))) if index else set()
        if index == count - 1:
            read = {name for references in inputs.values() for name in references}
            earlier |= {i for i in range(index) if f"s{i}" not in read}
        inputs[f"s{index}"] = [f"s{i}" for i in sorted(earlier)] or ["input"]
    return graph.build(inputs)


@pytest.mark.parametrize("policy", schedule.POLICIES.values(), ids=schedule.POLICIES)
@settings(deadline=None, derandomize=True, max_examples=150)
@given(graphs(), st.integers(1, 7), st.randoms(use_true_random=False))
def test_no_graph_with_any_durations_deadlocks_or_exceeds_its_limits(
    policy: schedule.Policy, stages: Graph, num_microbatches: int, random: Random
) -> None:
    run = Simulation(stages, policy, num_microbatches, lambda *action: random.randint(1, 9))
    for stage in stages.stages:
        order = run.order(stage)
        assert run.open(stage) <= run.limits[stage]
        for action in Action:  # strictly in micro-batch order, and each exactly once
            assert [m for kind, m in order if kind is action] == list(range(num_microbatches))
