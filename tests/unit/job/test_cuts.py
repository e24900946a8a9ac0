"""The cuts of a run, and which snapshots each stage of another cut needs."""

from __future__ import annotations

from collections.abc import Mapping

from rpcmp.checkpoint.slots import CommonSnapshot, HeldSnapshots
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.job.cuts import Cuts, HeldStep, with_stages
from rpcmp.v1 import control_pb2 as pb
from tests.support.graphs import chain_of

FIRST = {"s0": ["a", "b", "c"], "s1": ["d"]}
OTHER = {"s0": ["a"], "s1": ["b", "c", "d"]}

WORKERS = [Member("s0", 0, 0, 1), Member("s1", 1, 0, 1)]
ADDRESSES = ["host0:1", "host1:1"]


def held(*cuts: Mapping[str, tuple[int, ...]]) -> dict[str, HeldSnapshots]:
    """Return what the servers of both stages hold of their own, by cut."""
    return {
        name: HeldSnapshots(
            cuts[0].get(name, ()),
            later_cuts={n: HeldSnapshots(cut.get(name, ())) for n, cut in enumerate(cuts) if n},
        )
        for name in FIRST
    }


def cuts(*known: dict[str, list[str]]) -> Cuts:
    """Return cuts of which the last one is the current one."""
    found = Cuts()
    for layers in known:
        found.change_to(layers)
    return found


def test_a_cut_keeps_its_number() -> None:
    run = cuts(FIRST, OTHER, FIRST)
    assert (run.known, run.current, run.layers) == ([FIRST, OTHER], 0, FIRST)
    assert Cuts().layers == {}


def test_the_newest_step_counts_whatever_its_cut() -> None:
    run, newest = cuts(FIRST, OTHER), CommonSnapshot(5, {"s0": "s0", "s1": "s1"})
    before = {"s0": (4, 5), "s1": (4, 5)}
    assert run.newest(WORKERS, held(before), range(9)) == HeldStep(newest, 0)
    half = held(before, {"s0": (6,)})  # one stage has done a step more
    assert run.newest(WORKERS, half, range(9)) == HeldStep(newest, 0)
    both = held(before, {"s0": (6,), "s1": (6,)})
    found = run.newest(WORKERS, both, range(9))
    assert found is not None
    assert (found.common.step, found.cut) == (6, 1)
    assert run.newest(WORKERS, half, range(9), of_any=False) is None
    assert run.newest(WORKERS, both, range(9), of_any=False) == found
    assert run.newest(WORKERS, held({}), range(9)) is None
    assert run.newest(WORKERS, both, range(4)) is None


def test_a_stage_gets_a_snapshot_of_each_stage_that_had_its_layers() -> None:
    step = HeldStep(CommonSnapshot(5, {"s0": "s0", "s1": "s1"}), 0)
    assert cuts(FIRST, OTHER).restores(step, WORKERS, ADDRESSES) == {
        "s0": pb.Restore(step=5, parts=[pb.Part(stage_name="s0")]),
        "s1": pb.Restore(
            step=5, parts=[pb.Part(stage_name="s0", address="host0:1"), pb.Part(stage_name="s1")]
        ),
    }


def test_a_lost_servers_snapshot_comes_from_its_mirror() -> None:
    step = HeldStep(CommonSnapshot(5, {"s0": "s1", "s1": "s1"}), 1)
    restores = cuts(FIRST, OTHER, FIRST).restores(step, WORKERS, ADDRESSES)
    assert [(p.stage_name, p.cut, p.address) for p in restores["s0"].parts] == [
        ("s0", 1, "host1:1"),
        ("s1", 1, "host1:1"),
    ]
    assert [(p.stage_name, p.cut, p.address) for p in restores["s1"].parts] == [("s1", 1, "")]


def test_replicas_read_what_their_own_servers_hold() -> None:
    replicas = [Member(name, index, r, 2) for index, name in enumerate(FIRST) for r in range(2)]
    holders = {worker.label: worker.label for worker in replicas}
    addresses = ["a:1", "b:1", "c:1", "d:1"]
    restores = cuts(FIRST, OTHER).restores(
        HeldStep(CommonSnapshot(5, holders), 0), replicas, addresses
    )
    second = restores[replicas[3].label]
    assert [(p.stage_name, p.address) for p in second.parts] == [("s0", "a:1"), ("s1", "")]


def test_a_stage_of_the_same_cut_gets_its_own_snapshot() -> None:
    step = HeldStep(CommonSnapshot(5, {"s0": "s1", "s1": "s1"}), 0)
    assert cuts(FIRST).restores(step, WORKERS, ADDRESSES) == {
        "s0": pb.Restore(step=5, address="host1:1"),
        "s1": pb.Restore(step=5),
    }


SHRUNK, GROWN = {"s1": ["a", "b", "c", "d"]}, {"s0": ["a"], "s2": ["b", "c"], "s1": ["d"]}


def test_what_a_mirror_has_of_a_stage_that_has_left_is_restored_from() -> None:
    run, left = cuts(FIRST, SHRUNK), [Member("s1", 0)]
    holdings = {"s1": HeldSnapshots((4, 5), {"s0": (4,)})}
    found = run.newest(left, holdings, range(9))
    assert found == HeldStep(CommonSnapshot(4, {"s0": "s1", "s1": "s1"}), 0)
    (parts,) = [each.parts for each in run.restores(found, left, ["host1:1"]).values()]
    assert [(part.stage_name, part.address) for part in parts] == [("s0", ""), ("s1", "")]
    assert run.newest(left, {"s1": HeldSnapshots((4, 5))}, range(9)) is None


def test_a_stage_that_has_joined_gets_its_layers_from_those_that_had_them() -> None:
    run = cuts(FIRST, GROWN)
    members = [Member("s0", 0), Member("s2", 1), Member("s1", 2)]
    holdings = {**held({"s0": (5,), "s1": (5,)}), "s2": HeldSnapshots()}
    found = run.newest(members, holdings, range(9))
    assert found is not None
    restores = run.restores(found, members, ["host0:1", "host2:1", "host1:1"])
    assert [(part.stage_name, part.address) for part in restores["s2"].parts] == [("s0", "host0:1")]
    assert [(part.stage_name, part.address) for part in restores["s1"].parts] == [("s1", "")]


def test_stages_of_another_number_have_the_settings_that_all_share() -> None:
    stages = [
        {"name": "front", "threads": 2, "addresses": ["a:1"], "memory": "1 GiB"},
        {"name": "back", "threads": 2, "addresses": ["b:1"]},
    ]
    config = chain_of(2, rebalance="auto", stages=stages)
    more = with_stages(config, {"front": 1, "stage2": 2, "back": 1})
    assert more.stage_names == ["front", "stage2", "back"]
    assert [stage.threads for stage in more.stages] == [2, 2, 2]
    assert [stage.memory for stage in more.stages] == ["1 GiB", None, None]
    assert more.addresses == []  # of all stages, or of none
    assert Config.model_validate_json(more.model_dump_json()).num_stages == 3
    assert with_stages(config, {"back": 4}).addresses == ["b:1"]


def test_the_number_of_stages_in_the_config_counts_no_longer() -> None:
    model = {"layers": "m:layers", "num_stages": 2, "balance": "auto"}
    config = chain_of(2, rebalance="auto", model=model)
    more = with_stages(config, {"stage0": 1, "stage2": 2, "stage1": 1})
    assert Config.model_validate_json(more.model_dump_json()).num_stages == 3
