"""The simulation of a step, for any graph, schedule and durations."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.topology import Graph
from rpcmp.pipelining import schedule, simulation
from rpcmp.pipelining.schedule import Action, InFlightLimits
from rpcmp.pipelining.simulation import ActionTimes, SharedCores, Simulation, Wire, fixed
from tests.support.examples import examples
from tests.support.graphs import graphs
from tests.support.simulations import idle_share, most_held

F, B, W = Action

PAIR = topology.chain_graph(["a", "b"])
ONE_F_ONE_B = schedule.policy("1f1b")


def simulate(
    stages: Graph, times: ActionTimes, name: str = "1f1b", latency: float = 0.0
) -> Simulation:
    """Return the simulation of two micro-batches on equal stages."""
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, 2)
    durations = fixed(dict.fromkeys(stages.stages, times), limits)
    return Simulation(stages, policy, 2, durations, limits, latency)


def test_a_whole_backward_takes_the_time_of_both_its_parts() -> None:
    limits = {"whole": InFlightLimits(1, 1), "split": InFlightLimits(1, 1, splits=True)}
    duration = fixed(dict.fromkeys(limits, ActionTimes(1.0, 20.0, 300.0)), limits)
    assert [duration("whole", action, 0) for action in (F, B)] == [1.0, 320.0]
    assert [duration("split", action, 0) for action in Action] == [1.0, 20.0, 300.0]


def test_a_message_takes_its_time_each_way() -> None:
    run = simulate(PAIR, ActionTimes(1.0, 1.0, 0.0), latency=0.25)
    assert [tuple(done) for done in run.runs["b"]] == [
        (F, 0, 1.25, 2.25),
        (B, 0, 2.25, 3.25),
        (F, 1, 3.25, 4.25),
        (B, 1, 4.25, 5.25),
    ]
    assert [done.start for done in run.runs["a"]] == [0.0, 1.0, 3.5, 5.5]
    assert run.makespan == 6.5


def test_a_link_carries_one_message_after_the_other_each_way() -> None:
    limits = simulation.limits(PAIR, ONE_F_ONE_B, 2, 4)
    run = Simulation(
        *(PAIR, ONE_F_ONE_B, 2, lambda stage, action, number: 1.0, limits),
        wires=lambda one, other, number: Wire(0.25, 3.0 if one == "a" else 0.0),
    )
    assert [tuple(done) for done in run.runs["b"]] == [
        (F, 0, 4.25, 5.25),  # sent from 1 to 4
        (B, 0, 5.25, 6.25),
        (F, 1, 7.25, 8.25),  # computed at 2, sent from 4 to 7
        (B, 1, 8.25, 9.25),
    ]
    assert [done.start for done in run.runs["a"]] == [0.0, 1.0, 6.5, 9.5]


def test_stages_that_share_a_core_have_it_one_after_the_other() -> None:
    limits = simulation.limits(PAIR, ONE_F_ONE_B, 2)
    durations = fixed(dict.fromkeys("ab", ActionTimes(1.0, 1.0, 0.0)), limits)
    for number, starts in ((1, [[0.0, 1.0, 4.0, 7.0], [2.0, 3.0, 5.0, 6.0]]), (2, None)):
        shared = [SharedCores(number, dict.fromkeys("ab", 0.0))]
        run = Simulation(PAIR, ONE_F_ONE_B, 2, durations, limits, shared=shared)
        if starts is None:  # there are enough
            assert run.runs == Simulation(PAIR, ONE_F_ONE_B, 2, durations, limits).runs
        else:
            assert [[done.start for done in run.runs[stage]] for stage in "ab"] == starts


@settings(deadline=None)
@given(graphs(), st.sampled_from(["1f1b", "zero-bubble"]), st.integers(1, 6), st.integers(1, 3))
def test_no_more_actions_run_at_once_than_there_are_cores(
    stages: Graph, name: str, count: int, number: int
) -> None:
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, count)
    durations = fixed(dict.fromkeys(stages.stages, ActionTimes(1.0, 2.0, 3.0)), limits)
    shared = [SharedCores(number, dict.fromkeys(stages.stages, 0.0))]
    run = Simulation(stages, policy, count, durations, limits, shared=shared)
    done = [each for runs in run.runs.values() for each in runs]
    assert sum(each.end - each.start for each in done) == 6.0 * count * len(stages.stages)
    for each in done:
        at_once = [other for other in done if other.start <= each.start < other.end]
        assert len(at_once) <= number


def test_a_stage_is_idle_when_it_does_nothing() -> None:
    run = simulate(PAIR, ActionTimes(1.0, 1.0, 0.0))
    assert run.makespan == 6.0
    assert [idle_share(run, stage) for stage in PAIR.stages] == pytest.approx([1 / 3, 1 / 3])
    assert idle_share(simulate(PAIR, ActionTimes(0.0, 0.0, 0.0)), "a") == 0.0


def test_a_micro_batch_is_held_until_its_weight_gradient_or_its_whole_backward() -> None:
    run = simulate(PAIR, ActionTimes(1.0, 1.0, 1.0), "zero-bubble")
    assert [most_held(run, "b", until) for until in (B, W)] == [1, 2]
    assert [most_held(run, "a", until) for until in (B, W)] == [2, 2]
    whole = simulate(topology.chain_graph(["a"]), ActionTimes(1.0, 1.0, 1.0))
    assert [most_held(whole, "a", until) for until in (B, W)] == [1, 1]


def test_only_stages_that_read_stages_split() -> None:
    stages = topology.build_graph(
        {"a": ["input"], "b": ["a", "input"], "c": ["input"], "d": ["b", "c"]}
    )
    limits = simulation.limits(stages, schedule.policy("zero-bubble"), 4)
    assert [limits[stage].splits for stage in "abcd"] == [False, True, False, True]


def test_depths_are_counted_along_the_longest_way_to_the_loss() -> None:
    stages = topology.build_graph(
        {"a": ["input"], "b": ["a"], "c": ["input"], "d": ["a", "b", "c"]}
    )
    limits = simulation.limits(stages, ONE_F_ONE_B, 8)
    assert [limits[stage].open for stage in "abcd"] == [3, 2, 2, 1]


def test_a_schedule_that_deadlocks_is_detected() -> None:
    none = dict.fromkeys(PAIR.stages, InFlightLimits(0, 0))
    with pytest.raises(RuntimeError, match="the schedule deadlocks"):
        Simulation(PAIR, ONE_F_ONE_B, 1, lambda *action: 1.0, none)


@pytest.mark.parametrize("name", schedule.POLICIES)
@examples(100)
@given(graphs(), st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_action_runs_after_its_dependencies_and_alone(
    name: str, stages: Graph, num_microbatches: int, latency: int, random: Random
) -> None:
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, num_microbatches)
    run = Simulation(
        *(stages, policy, num_microbatches, lambda *action: random.randint(0, 5), limits, latency)
    )
    at = {(s, done.action, done.microbatch): done for s in stages.stages for done in run.runs[s]}
    for reader, references in stages.inputs.items():
        for microbatch, ref in itertools.product(range(num_microbatches), references):
            if not ref.from_batch:
                sent, read = at[ref.producer, F, microbatch], at[reader, F, microbatch]
                assert read.start >= sent.end + latency
                sent, read = at[reader, B, microbatch], at[ref.producer, B, microbatch]
                assert read.start >= sent.end + latency
    for (stage, action, microbatch), done in at.items():
        if action is not F:
            before = F if action is B else B
            assert done.start >= at[stage, before, microbatch].end
    for runs in run.runs.values():
        assert all(one.end <= other.start for one, other in itertools.pairwise(runs))
    assert run.makespan == max(done.end for done in at.values())
