"""A cluster that does not exist, next to the event simulation that runs and `explain` use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config.topology import chain_graph
from rpcmp.errors import ConfigError
from rpcmp.pipelining import simulation
from rpcmp.pipelining.schedule import Action, policy
from rpcmp.pipelining.simulation import Simulation
from rpcmp.tools import cluster_simulation
from rpcmp.tools.cluster_simulation import Cluster, load, one_f_one_b, outlook
from tests.support.examples import examples

WORK = {"forward_ms": 10.0, "backward_ms": 20.0, "activation": "1 kB"}
NOTHING = {"message_ms": 0.0, "recovery_s": 0.0, "recovery_s_per_stage": 0.0}


def cluster(**changed: Any) -> Cluster:
    return Cluster.model_validate({"work": WORK, "links": {"latency_ms": 0.0}, **changed})


@examples(100)
@given(
    stages=st.integers(1, 9),
    count=st.integers(1, 20),
    wire=st.sampled_from([0.0, 0.5, 3.0]),
    spread=st.sampled_from([0.0, 0.2]),
)
def test_a_step_takes_as_long_as_its_event_simulation(
    stages: int, count: int, wire: float, spread: float
) -> None:
    random = np.random.default_rng(0)
    varied = random.uniform(1 - spread, 1 + spread, (2, stages, count))
    forwards, backwards = varied * [[[1.0]], [[2.0]]]
    graph, chosen = chain_graph([str(place) for place in range(stages)]), policy("1f1b")

    def seconds(stage: str, action: Action, microbatch: int) -> float:
        times = forwards if action is Action.FORWARD else backwards
        return float(times[int(stage), microbatch])

    limits = simulation.limits(graph, chosen, count)
    slow = Simulation(graph, chosen, count, seconds, limits, wire)
    started, ended = one_f_one_b(forwards, backwards, wire)
    # Where times vary, a stage of a run may choose another order than that of equal times.
    near = 0.05 if spread else 1e-9
    assert list(started) == pytest.approx([slow.runs[stage][0].start for stage in graph.stages])
    assert list(ended) == pytest.approx([slow.runs[stage][-1].end for stage in graph.stages], near)


def test_equal_hosts_wait_only_while_the_pipeline_fills_and_drains() -> None:
    small = {**WORK, "state": "1 kB"}
    found = outlook(cluster(work=small, overheads=NOTHING, hosts={"mtbf_hours": 1e9}), 10)
    assert found.step_s == pytest.approx((40 + 9) * 0.03, rel=1e-3)
    assert found.busy == pytest.approx(40 / 49, rel=1e-3)
    assert found.efficiency == pytest.approx(found.busy, rel=1e-6)
    assert found.walls == []


def test_a_seed_gives_the_same_cluster_again() -> None:
    first, again, other = (
        outlook(cluster(hosts={"speed_spread": 0.2, "jitter": 0.1}, seed=seed), 8)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.step_s > outlook(cluster(), 8).step_s


def test_a_fault_costs_its_recovery_and_a_step() -> None:
    costs = {**NOTHING, "recovery_s": 10.0}
    found = outlook(cluster(overheads=costs, hosts={"mtbf_hours": 10.0}), 4)
    assert found.faults_per_day == pytest.approx(4 * 2.4)
    rate = 4 / 36_000
    assert found.lost == pytest.approx(rate * (10.0 + found.step_s), rel=1e-2)
    assert found.efficiency == pytest.approx(found.busy * (1 - found.lost))


@pytest.mark.parametrize(
    ("changed", "wall"),
    [
        ({"overheads": {**NOTHING, "driver_ms": 100.0}}, "the driver takes"),
        ({"work": {**WORK, "state": "100 GB"}}, "copies of 93.1 GiB after each step"),
        ({"hosts": {"mtbf_hours": 0.01}}, "faults take"),
        ({"hosts": {"speed_spread": 0.4}}, "the slowest host"),
        ({"work": {**WORK, "activation": "1 GB"}}, "an activation takes 1000.0 ms"),
    ],
)
def test_what_stands_in_the_way_is_named(changed: dict[str, Any], wall: str) -> None:
    small = {"work": {**WORK, "state": "1 kB"}} | changed
    found = outlook(cluster(**small), 8)
    assert [text for text in found.walls if text.startswith(wall)]


def test_a_link_carries_no_more_than_its_bandwidth() -> None:
    found = outlook(cluster(work={**WORK, "activation": "1 GB"}, overheads=NOTHING), 2)
    assert found.step_s >= 8 * 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages = [2]", "work: missing"),
        ("[work]\nforward_ms = 1.0\nbackward_ms = -1.0", "work.backward_ms: must be more than 0"),
        ("[work]\nforwards_ms = 1.0", "did you mean 'forward_ms'?"),
        ("[work]\nforward_ms = 1.0\nbackward_ms = 1.0\n[hosts]\nmtbf_hours = -2.0", "mtbf_hours"),
        ("seed = -1\n[work]\nforward_ms = 1.0\nbackward_ms = 1.0", "seed: must be 0 or more"),
        ("[work]\nforward_ms = inf\nbackward_ms = 1.0", "work.forward_ms: "),
        ("stages = [0]\n[work]\nforward_ms = 1.0\nbackward_ms = 1.0", "stages.0"),
        (
            "stages = [4000]\n[work]\nforward_ms = 1.0\nbackward_ms = 1.0",
            "128,000,000 actions, more than",
        ),
        ("[work", "is not a TOML file"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        load(tmp_path / "none.toml")


def test_a_thousand_stages_are_a_row(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    sizes = "stages = [1000]\nmicrobatches_per_stage = 1\n"
    path.write_text(f"{sizes}[work]\nforward_ms = 20.0\nbackward_ms = 40.0")
    found = [outlook(given, number) for given in [load(path)] for number in given.stages]
    cells = cluster_simulation.cells(found[0])
    assert (len(cells), cells[0]) == (len(cluster_simulation.HEADS), "1000")
