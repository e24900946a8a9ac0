"""The picture of a step's schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.topology import Graph
from rpcmp.pipelining import schedule, simulation
from rpcmp.pipelining.simulation import ActionTimes, SimulatedRun, Simulation
from rpcmp.tools.explain.schedule_picture import actions, picture
from tests.support.examples import examples
from tests.support.graphs import graphs


def simulated(stages: Graph, name: str, count: int, times: Mapping[str, ActionTimes]) -> Simulation:
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, count)
    return Simulation(stages, policy, count, simulation.fixed(times, limits), limits)


def test_equal_times_give_the_schedules_clock_diagram() -> None:
    names = ["first", "last"]
    run = simulated(
        topology.chain_graph(names), "1f1b", 3, dict.fromkeys(names, ActionTimes(1.0, 0.5, 0.5))
    )
    assert picture(run.runs, names, 33) == [
        "0 first  F0 F1    B0 F2 B1    B2",
        "1 last      F0 B0 F1 B1 F2 B2",
    ]
    assert actions(run.runs, names) == {
        "first": ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        "last": ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    }


def test_a_longer_action_is_drawn_longer() -> None:
    names = ["slow", "fast"]
    times = {"slow": ActionTimes(0.04, 0.01, 0.0), "fast": ActionTimes(0.01, 0.01, 0.0)}
    rows = picture(simulated(topology.chain_graph(names), "1f1b", 2, times).runs, names, 60)
    assert rows[0].index("F1") - rows[0].index("F0") > 2 * (len("F0") + 1)


def test_a_long_step_is_cut_into_blocks() -> None:
    names = ["a", "b"]
    run = simulated(
        topology.chain_graph(names), "1f1b", 40, dict.fromkeys(names, ActionTimes(1.0, 1.0, 0.0))
    )
    lines = picture(run.runs, names, 80)
    assert all(len(line) <= 80 for line in lines)
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) > 2
    assert all([row.split()[1] for row in block.splitlines()] == names for block in blocks)
    everything = re.findall(r"[FB]\d+", "\n".join(b.splitlines()[0] for b in blocks))
    assert everything == [action[1:] for action in actions(run.runs, names)["a"]]


def columns(
    lines: Sequence[str], runs: Mapping[str, Sequence[SimulatedRun]]
) -> list[tuple[float, int]]:
    """Return start and column of every action; the blocks of a row are joined."""
    found = []
    for line, done in zip(lines, runs.values(), strict=True):
        places = [m.start() for m in re.finditer(r"[FBW]\d+", line)]
        assert len(places) == len(done)
        found += [(round(run.start, 9), place) for run, place in zip(done, places, strict=True)]
    return sorted(found)


@pytest.mark.parametrize("name", schedule.POLICIES)
@examples(60)
@given(graphs(), st.integers(1, 7), st.data())
def test_columns_of_the_picture_are_points_in_time(
    name: str, shape: Graph, count: int, data: st.DataObject
) -> None:
    """A later start is never further left, and equal starts share a column."""
    seconds = st.integers(1, 30).map(lambda ms: ms / 1000)
    times = {
        stage: data.draw(st.builds(ActionTimes, seconds, seconds, seconds))
        for stage in shape.stages
    }
    run = simulated(shape, name, count, times)
    names = list(shape.stages)
    lines = picture(run.runs, names, 10_000)
    prefix = max(len(f"{index} {one}") for index, one in enumerate(names))
    places = columns([" " * prefix + line[prefix:] for line in lines], run.runs)
    assert [column for _, column in places] == sorted(column for _, column in places)
    assert len({start for start, _ in places}) == len(set(places))
