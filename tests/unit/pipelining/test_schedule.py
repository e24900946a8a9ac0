"""Schedules: the pictures in rpcmp.pipelining.schedule, memory limits, freedom from deadlock."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.topology import Graph
from rpcmp.errors import ConfigError
from rpcmp.pipelining import schedule, simulation
from rpcmp.pipelining.schedule import Action, InFlightLimits, StagePosition
from rpcmp.pipelining.simulation import ActionTimes, Duration, Simulation, fixed
from tests.support.examples import examples
from tests.support.graphs import graphs
from tests.support.simulations import most_held

F, B, W = Action

HALVES = ActionTimes(1.0, 0.5, 0.5)  # a whole backward takes as long as a forward
EQUAL = ActionTimes(1.0, 1.0, 1.0)  # each half of a split backward takes as long as a forward


def chain(
    name: str, num_stages: int, num_microbatches: int, times: ActionTimes, most: int | None = None
) -> Simulation:
    """Return the simulation of a chain of equal stages under the schedule called `name`."""
    stages = topology.chain_graph([f"stage{index}" for index in range(num_stages)])
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, num_microbatches, most)
    durations = fixed(dict.fromkeys(stages.stages, times), limits)
    return Simulation(stages, policy, num_microbatches, durations, limits)


def picture(run: Simulation) -> str:
    """Return the stages' actions over time, if each begins at a whole number."""
    rows = []
    for stage, runs in run.runs.items():
        cells = {int(done.start): f"{done.action}{done.microbatch}" for done in runs}
        row = " ".join(f"{cells.get(time, '.'):2}" for time in range(int(run.makespan)))
        rows.append(f"{stage.replace('stage', 'stage ')}   {row}".rstrip())
    return "\n".join(rows)


PICTURES = {
    ("gpipe", 3, 4): """\
stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .""",
    ("1f1b", 3, 4): """\
stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .""",
    ("zero-bubble", 3, 4): """\
stage 0   F0 F1 F2 .  .  B0 .  F3 B1 .  B2 .  B3 .
stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3""",
    ("gpipe", 2, 3): """\
stage 0   F0 F1 F2 .  .  B0 B1 B2
stage 1   .  F0 F1 F2 B0 B1 B2 .""",
    ("1f1b", 2, 3): """\
stage 0   F0 F1 .  B0 F2 B1 .  B2
stage 1   .  F0 B0 F1 B1 F2 B2 .""",
    ("zero-bubble", 2, 3): """\
stage 0   F0 F1 .  B0 .  F2 B1 .  B2 .
stage 1   .  F0 B0 F1 B1 W0 F2 B2 W1 W2""",
    ("gpipe", 1, 3): "stage 0   F0 F1 F2 B0 B1 B2",
    ("1f1b", 1, 3): "stage 0   F0 B0 F1 B1 F2 B2",
    ("zero-bubble", 1, 3): "stage 0   F0 B0 .  F1 B1 .  F2 B2 .",  # one stage does not split
    # With fewer micro-batches than stages, schedules differ only in the last stages.
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
    times = EQUAL if name == "zero-bubble" else HALVES
    assert picture(chain(name, num_stages, num_microbatches, times)) == drawn


@pytest.mark.parametrize("name", schedule.POLICIES)
def test_the_module_draws_the_same_pictures(name: str) -> None:
    lines = [line.strip() for line in (schedule.__doc__ or "").splitlines()]
    for row in PICTURES[name, 3, 4].splitlines():
        assert row in lines


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_equal_times_leave_only_fill_and_drain_bubbles(
    name: str, num_stages: int, num_microbatches: int
) -> None:
    run = chain(name, num_stages, num_microbatches, HALVES)
    assert run.makespan == 2 * (num_microbatches + num_stages - 1)


@pytest.mark.parametrize("num_stages", range(1, 10))
def test_zero_bubble_with_equal_times_has_only_the_fill_bubble(num_stages: int) -> None:
    for num_microbatches in range(num_stages, 2 * num_stages + 4):
        run = chain("zero-bubble", num_stages, num_microbatches, EQUAL)
        assert run.makespan == (num_stages - 1) + 3 * num_microbatches


@examples(300)
@given(
    st.integers(1, 8),
    st.integers(1, 16),
    st.builds(ActionTimes, *3 * [st.integers(1, 9).map(float)]),
)
def test_on_equal_stages_zero_bubble_never_takes_longer_than_1f1b(
    num_stages: int, num_microbatches: int, times: ActionTimes
) -> None:
    split, whole = (
        chain(name, num_stages, num_microbatches, times) for name in ("zero-bubble", "1f1b")
    )
    assert split.makespan <= whole.makespan


@pytest.mark.parametrize(
    ("name", "opened", "held"),
    [
        ("gpipe", [8, 8, 8], [8, 8, 8]),
        ("1f1b", [3, 2, 1], [3, 2, 1]),
        ("zero-bubble", [3, 2, 1], [3, 3, 3]),
    ],
)
def test_a_stage_keeps_what_its_schedule_needs_and_no_more(
    name: str, opened: list[int], held: list[int]
) -> None:
    run = chain(name, 3, 8, EQUAL)
    assert [most_held(run, stage, B) for stage in run.runs] == opened
    assert [most_held(run, stage, W) for stage in run.runs] == held


def test_gpipe_waits_for_the_last_forward_even_if_a_backward_is_ready() -> None:
    stages, policy = topology.chain_graph(["slow", "fast"]), schedule.policy("gpipe")
    limits = simulation.limits(stages, policy, 3)
    durations = fixed({"slow": ActionTimes(5, 5, 0), "fast": ActionTimes(1, 1, 0)}, limits)
    run = Simulation(stages, policy, 3, durations, limits)
    assert [done.action for done in run.runs["fast"]] == [F, F, F, B, B, B]


# Limits.


FIRST, MIDDLE, LAST = (
    StagePosition(3, 3, False),
    StagePosition(2, 3, True),
    StagePosition(1, 3, True),
)


@pytest.mark.parametrize(
    ("name", "most", "limits"),
    [
        ("gpipe", None, [(8, 8), (8, 8), (8, 8)]),
        ("1f1b", None, [(3, 3), (2, 2), (1, 1)]),
        ("1f1b", 1, [(1, 1), (1, 1), (1, 1)]),
        ("1f1b", 2, [(2, 2), (2, 2), (1, 1)]),
        ("1f1b", 5, [(5, 5), (4, 4), (3, 3)]),
        ("zero-bubble", None, [(3, 3), (2, 4, True, 1), (1, 4, True, 2)]),
        ("zero-bubble", 1, [(1, 1), (1, 1, True, 0), (1, 1, True, 0)]),
        ("zero-bubble", 6, [(5, 5), (3, 6, True, 2), (1, 6, True, 4)]),
    ],
)
def test_limits_follow_the_place_and_max_in_flight(
    name: str, most: int | None, limits: list[tuple[Any, ...]]
) -> None:
    policy = schedule.policy(name)
    found = [policy.limits(place, 8, most) for place in (FIRST, MIDDLE, LAST)]
    assert found == [InFlightLimits(*each) for each in limits]


@pytest.mark.parametrize("name", schedule.POLICIES)
def test_no_stage_opens_more_micro_batches_than_the_step_has(name: str) -> None:
    assert schedule.policy(name).limits(StagePosition(5, 5, True), 2, None).open == 2


def test_more_than_twice_the_longest_way_changes_nothing_under_zero_bubble() -> None:
    policy = schedule.policy("zero-bubble")
    for place in (FIRST, MIDDLE, LAST):
        assert policy.limits(place, 32, 6) == policy.limits(place, 32, 7)
        assert policy.limits(place, 32, 6) == policy.limits(place, 32, 1000)
        assert policy.limits(place, 32, 5) != policy.limits(place, 32, 6)


def test_gpipe_refuses_to_hold_less_than_everything() -> None:
    policy = schedule.policy("gpipe")
    assert policy.limits(FIRST, 8, 8) == policy.limits(FIRST, 8, None)
    with pytest.raises(ConfigError, match="max_in_flight = 7: gpipe holds all 8 micro-batches"):
        policy.limits(FIRST, 8, 7)


def test_an_unknown_schedule_names_the_existing_ones() -> None:
    exist = "there are 'gpipe', '1f1b', 'zero-bubble'"
    with pytest.raises(ConfigError, match=f"no schedule 'interleaved'; {exist}"):
        schedule.policy("interleaved")


# Any graph, any durations.


def at_random(random: Random) -> Duration:
    return lambda stage, action, microbatch: random.randint(1, 9)


@pytest.mark.parametrize("name", schedule.POLICIES)
@examples(150)
@given(
    graphs(), st.integers(1, 7), st.none() | st.integers(1, 13), st.randoms(use_true_random=False)
)
def test_no_graph_with_any_durations_deadlocks_or_exceeds_its_limits(
    name: str, stages: Graph, num_microbatches: int, most: int | None, random: Random
) -> None:
    most = None if name == "gpipe" else most
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, num_microbatches, most)
    run = Simulation(stages, policy, num_microbatches, at_random(random), limits)
    for stage, done in run.runs.items():
        assert most_held(run, stage, B) <= limits[stage].open <= limits[stage].held
        assert most_held(run, stage, W) <= limits[stage].held <= (most or limits[stage].held)
        kinds = Action if limits[stage].splits else (F, B)
        for action in kinds:  # strictly in micro-batch order, and each exactly once
            order = [microbatch for kind, microbatch, _, _ in done if kind is action]
            assert order == list(range(num_microbatches))
        assert len(done) == len(kinds) * num_microbatches
