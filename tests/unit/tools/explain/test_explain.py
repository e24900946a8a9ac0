"""What `rpcmp explain` makes of what it has found out: the picture, memory, listeners and links."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.config.topology import Graph
from rpcmp.pipelining import schedule, simulation
from rpcmp.pipelining.cost_model import predict
from rpcmp.pipelining.layer_profile import HostProfile, LayerProfile
from rpcmp.pipelining.partition import StageHost
from rpcmp.pipelining.simulation import ActionTimes, SimulatedRun, Simulation
from rpcmp.tools.explain.model_summary import LayerFacts, ModelSummary, StageFacts
from rpcmp.tools.explain.picture import (
    Listener,
    StageLink,
    Whereabouts,
    actions,
    listeners,
    picture,
    ways,
)
from rpcmp.tools.explain.stage import files, stages
from tests.support.graphs import graphs
from tests.support.processes import JobFolder


def simulated(stages: Graph, name: str, count: int, times: Mapping[str, ActionTimes]) -> Simulation:
    policy = schedule.policy(name)
    limits = simulation.limits(stages, policy, count)
    return Simulation(stages, policy, count, simulation.fixed(times, limits), limits)


# The picture.


def test_equal_times_are_drawn_as_the_schedules_own_pictures_are() -> None:
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


def test_what_takes_longer_is_drawn_longer() -> None:
    names = ["slow", "fast"]
    times = {"slow": ActionTimes(0.04, 0.01, 0.0), "fast": ActionTimes(0.01, 0.01, 0.0)}
    rows = picture(simulated(topology.chain_graph(names), "1f1b", 2, times).runs, names, 60)
    assert rows[0].index("F1") - rows[0].index("F0") > 2 * (len("F0") + 1)


def test_a_long_step_goes_on_below() -> None:
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
    """Start and column of every action; rows that go on below are put beside each other."""
    found = []
    for line, done in zip(lines, runs.values(), strict=True):
        places = [m.start() for m in re.finditer(r"[FBW]\d+", line)]
        assert len(places) == len(done)
        found += [(round(run.start, 9), place) for run, place in zip(done, places, strict=True)]
    return sorted(found)


@pytest.mark.parametrize("name", schedule.POLICIES)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(graphs(), st.integers(1, 7), st.data())
def test_columns_are_moments(name: str, shape: Graph, count: int, data: st.DataObject) -> None:
    """What begins later never stands further left, and what begins together in one column."""
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


# Memory.


def layer(state: int, activations: int, received: int) -> LayerProfile:
    return LayerProfile(
        forward_s=0.01,
        backward_s=0.01,
        weight_s=0.01,
        update_s=0.0,
        state_bytes=state,
        activation_bytes=activations,
        input_bytes=received,
    )


def facts(layers: int, parameters: int, optimizer: int | None) -> StageFacts:
    return StageFacts(
        layers=[LayerFacts(name=f"layer{index}", parameters=1) for index in range(layers)],
        parameters=parameters,
        trained=parameters,
        foreign=[],
        foreign_parameters=0,
        parameter_bytes=4 * parameters,
        buffer_bytes=8,
        foreign_bytes=0,
        gradient_bytes=4 * parameters,
        optimizer_bytes=optimizer,
    )


def chain_of(num_stages: int, **more: Any) -> Config:
    config: Config = parse_config(
        {"loss": "m:loss", "model": {"layers": "m:layers", "balance": [2, 1]}, **more}
    )
    assert config.num_stages == num_stages
    return config


def inventory(*found: StageFacts, tied: list[list[str]] | None = None) -> ModelSummary:
    return ModelSummary(
        stages=list(found),
        parameters=sum(stage.parameters for stage in found),
        tied=tied or [],
        batches={},
        steps=1,
        unknown="",
        available_bytes=1000,
    )


def hosts(**changes: Any) -> list[StageHost]:
    layers = [layer(100, 10, 1), layer(200, 20, 2), layer(400, 40, 4)]
    profile = HostProfile(layers=layers, base_bytes=1000, available_bytes=10_000)
    settings = {"limit_bytes": 5000, "num_microbatches": 4, "recompute": False} | changes
    return [StageHost(stage=f"stage{i}", profile=profile, held=2 - i, **settings) for i in range(2)]


def test_memory_is_that_of_the_balance_and_names_its_parts() -> None:
    """The parts are counted, the rest is measured: together they are what cuts go by."""
    config, measured = chain_of(2), hosts()
    counted = inventory(facts(2, 20, 300 - 2 * 80 - 8), facts(1, 30, 400 - 2 * 120 - 8))
    first, last = stages(config, counted, measured)
    assert (first.memory.process, first.memory.activations) == (1000, 2 * 1 + 2 * 30)
    assert (last.memory.activations, last.in_flight) == (1 * 4 + 1 * 40, 1)
    predicted = predict(config, measured, [2, 1]).stages
    assert [stage.memory.total for stage in (first, last)] == [
        stage.memory_bytes for stage in predicted.values()
    ]
    assert first.memory.snapshots == 3 * (80 + 8 + 132)
    assert not first.memory.is_too_much
    assert stages(config, counted, hosts(limit_bytes=1100))[0].memory.is_too_much
    kept = stages(config, counted, hosts(recompute=True))[0].memory.activations
    assert kept == 2 * 1 + 30


def test_an_optimizer_that_does_not_tell_is_what_is_left_of_the_measured() -> None:
    counted = inventory(facts(2, 20, None), facts(1, 30, None))
    first, _ = stages(chain_of(2), counted, hosts())
    assert first.memory.optimizer == 300 - 2 * 80 - 8


def test_without_a_measurement_what_is_unknown_is_said_so() -> None:
    counted = inventory(facts(2, 20, None), facts(1, 30, 0))
    first, last = stages(chain_of(2), counted, None)
    memory = first.memory
    assert (memory.process, memory.activations, memory.optimizer) == (None, None, None)
    assert (memory.total, memory.limit, memory.snapshots) == (168, 500, None)
    given = chain_of(2, stages=[{"memory": "1 MiB"}, {}])
    assert stages(given, counted, None)[0].memory.limit == 2**20
    away = chain_of(2, stages=[{"addresses": ["a:1"]}, {"addresses": ["b:1"]}])
    assert stages(away, counted, None, away.addresses)[1].memory.limit is None
    assert stages(away, counted, None, away.addresses)[1].addresses == ["b:1"]
    assert last.memory.total == 248


# Listeners and links.


def here(label: str, address: str = "", machine: str = "m") -> Whereabouts:
    return Whereabouts(address, "host", machine, f"of {label}" if address else "shared", "")


LABELS = ("driver", "stage0", "stage1")


def dials(found: Sequence[StageLink]) -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    return {(way.one, way.other): way.dials for way in found}


def test_on_one_machine_only_the_driver_and_the_rendezvous_are_dialled() -> None:
    found = ways(chain_of(2), {label: here(label) for label in LABELS})
    assert dials(found) == {
        ("driver", "stage0"): (("driver", "stage0"),),
        ("driver", "stage1"): (("driver", "stage1"),),
        ("stage0", "stage1"): (("stage1", "stage0"),),
    }
    assert not any(way.crosses_hosts or way.is_encrypted for way in found)
    (first, _) = listeners(chain_of(2), {label: here(label) for label in LABELS})
    assert first == Listener("stage0", None, "host", "you and root, on this machine", "")


def test_between_hosts_workers_dial_both_ways_by_tls() -> None:
    config = chain_of(2, security={"certs": "certs"})
    places = {
        label: here(label, f"{label}:1" if label != "driver" else "", machine=label)
        for label in LABELS
    }
    found = ways(config, places)
    assert dials(found)["stage0", "stage1"] == (("stage0", "stage1"), ("stage1", "stage0"))
    assert all(way.crosses_hosts and way.is_encrypted for way in found)
    assert {one.admits for one in listeners(config, places)} == {
        "who has a certificate of the authority, by TLS 1.3"
    }
    clear = chain_of(2, security={"insecure": True})
    assert not any(way.is_encrypted for way in ways(clear, places))
    assert "anybody who reaches the port" in listeners(clear, places)[0].admits


def test_stages_that_share_a_parameter_have_a_link_of_their_own() -> None:
    values = {
        "loss": "m:loss",
        "model": {"layers": "m:layers", "balance": [1, 1, 1]},
        "recovery": {"enabled": False},
    }
    labels = ("driver", "stage0", "stage1", "stage2")
    places = {
        label: here(label, f"127.0.0.1:{index}" if index else "")
        for index, label in enumerate(labels)
    }
    config: Config = parse_config(values)
    free = dials(ways(config, places))
    assert free["stage0", "stage2"] == (("stage2", "stage0"),)  # the rendezvous alone
    tied = ways(config, places, [["stage0", "stage2"]])
    (link,) = [way for way in tied if (way.one, way.other) == ("stage0", "stage2")]
    assert link.carries == ("gradients", "rendezvous")
    assert link.dials == (("stage0", "stage2"), ("stage2", "stage0"))


# Files.


def test_files_are_those_that_a_run_reads_and_writes(job: JobFolder) -> None:
    (job.folder / "notes.txt").write_text("not code")
    config = chain_of(2, checkpoint={"dir": "kept", "every_steps": 5}).with_folder(job.folder)
    code, run, checkpoints = files(config)
    assert (run.what, run.path) == ("run folder", str(job.folder / "runs"))
    sources = list(job.folder.rglob("*.py"))
    size = sum(len(path.read_bytes()) for path in sources)
    assert code.text == (f"{len(sources)} Python files ({size:,} bytes), sent to each stage server")
    assert checkpoints.path == str(job.folder / "kept")
    assert checkpoints.text.startswith("every 5 steps and at the end, 3 kept; each stage's file")
    assert not checkpoints.is_in_the_way
    (job.folder / "kept" / "step-00000003").mkdir(parents=True)
    (job.folder / "kept" / "step-00000003" / "manifest.json").write_text("{}")
    assert not files(config)[-1].is_in_the_way  # it is damaged, and in the way of no new run
    nothing = {"ship_code": False, "recovery": {"enabled": False}, "log": {"folder": ""}}
    (only,) = files(chain_of(2, **nothing))
    assert only.text == "none: recovery is off"
