"""The step that a group restores after lost snapshots, and the mirrors of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.checkpoint.slots import (
    CommonSnapshot,
    HeldSnapshots,
    Slots,
    mirrored_by,
    mirrors,
    newest_common,
)
from rpcmp.v1 import control_pb2 as pb
from tests.support.examples import examples
from tests.support.graphs import workers

WORKERS = workers("a", "b", "c")


def holdings(
    **stages: Collection[int] | tuple[Collection[int], str, Collection[int]],
) -> dict[str, HeldSnapshots]:
    """Of each stage: its own steps, or these, whose it mirrors, and the steps of that one."""
    found = {}
    for stage, held in stages.items():
        if isinstance(held, tuple):
            own, other, mirrored = held
            found[stage] = HeldSnapshots(own, {other: mirrored})
        else:
            found[stage] = HeldSnapshots(held)
    return found


# Where to go on


@pytest.mark.parametrize(
    ("held", "known", "found"),
    [
        (  # one worker died: all memory is there
            holdings(a=[5, 6, 7], b=[4, 5, 6], c=[5, 6, 7]),
            range(8),
            CommonSnapshot(6, {"a": "a", "b": "b", "c": "c"}),
        ),
        (  # a host is gone
            holdings(a=([5, 6, 7], "c", [4, 5]), b=([], "a", []), c=([5, 6], "b", [4, 5, 6])),
            range(8),
            CommonSnapshot(6, {"a": "a", "b": "c", "c": "c"}),
        ),
        (  # its neighbour had not got the last one yet
            holdings(a=[5, 6, 7], b=[], c=([5, 6, 7], "b", [3, 4, 5])),
            range(8),
            CommonSnapshot(5, {"a": "a", "b": "c", "c": "c"}),
        ),
        (  # the driver has not heard of the newest
            holdings(a=[5, 6], b=[5, 6], c=[5, 6]),
            [4, 5],
            CommonSnapshot(5, {"a": "a", "b": "b", "c": "c"}),
        ),
        (  # each holds one that another lacks
            holdings(a=([3], "b", [4]), b=([3], "c", [4]), c=([3], "a", [4])),
            [3, 4],
            CommonSnapshot(4, {"a": "c", "b": "a", "c": "b"}),
        ),
    ],
)
def test_newest_common_returns_the_newest_step_that_all_workers_can_restore(
    held: dict[str, HeldSnapshots], known: Collection[int], found: CommonSnapshot
) -> None:
    assert newest_common(WORKERS, held, known) == found


@pytest.mark.parametrize(
    ("held", "known"),
    [
        (holdings(a=[], b=[], c=[]), range(9)),
        (holdings(a=[1, 2], b=[3, 4], c=[1, 2, 3, 4]), range(9)),
        (holdings(a=[1, 2], b=[1, 2], c=[1, 2]), []),
        (holdings(a=[1, 2], b=[1, 2], c=[1, 2]), [3]),
        (holdings(a=[1], b=([1], "a", [1]), c=[]), [1]),  # two are gone, c and who had it
    ],
)
def test_newest_common_is_none_without_a_common_step(
    held: dict[str, HeldSnapshots], known: Collection[int]
) -> None:
    assert newest_common(WORKERS, held, known) is None


def test_a_stage_restores_its_own_snapshot_if_it_has_one() -> None:
    for names in (["a", "b"], ["b", "a"]):
        held = {
            "a": HeldSnapshots([1, 2], {"b": [1, 2]}),
            "b": HeldSnapshots([2], {"a": [1, 2]}),
        }
        held = {name: held[name] for name in names}
        assert newest_common(workers(*names), held, [1, 2]) == CommonSnapshot(
            2, {"a": "a", "b": "b"}
        )
        assert newest_common(workers(*names), held, [1]) == CommonSnapshot(1, {"a": "a", "b": "a"})


def test_mirrored_snapshots_of_unknown_stages_are_ignored() -> None:
    held = {"a": HeldSnapshots([3, 4], {"former": [4]}), "b": HeldSnapshots([3], {"b": [4]})}
    assert newest_common(workers("a", "b"), held, [3, 4]) == CommonSnapshot(3, {"a": "a", "b": "b"})


# Stages that train, of which one is lost


class Host:
    """A stage's server with the stage's snapshots and another's."""

    def __init__(self) -> None:
        self.own, self.mirror = Slots.create(), Slots.create()
        self.writing: int | None = None
        self.copying: int | None = None

    @property
    def done(self) -> int:
        """The last step that its stage has done."""
        return newest(self.own)

    def close(self) -> None:
        self.own.close()
        self.mirror.close()


def newest(slots: Slots) -> int:
    return max(steps(slots), default=0)


def steps(slots: Slots) -> list[int]:
    return [snapshot.step for snapshot in slots.all()]


class Cluster:
    """Stages that train as `rpcmp.checkpoint.slots` describes it.

    Attributes:
        hosts: of each stage.
        holders: which host has the snapshots of each stage as well.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self.names = [f"stage{index}" for index in range(len(machines))]
        self.hosts = [Host() for _ in machines]
        self.holders = [
            holder for holder in mirrors(machines, range(len(machines))) if holder is not None
        ]

    def copies(self, stage: int) -> Host:
        """Return the servers with copies of a stage's snapshots."""
        return self.hosts[self.holders[stage]]

    def may(self) -> list[tuple[Callable[[int], None], int]]:
        found: list[tuple[Callable[[int], None], int]] = []
        for stage, host in enumerate(self.hosts):
            there = self.copies(stage)
            copied = newest(there.mirror)
            is_ahead = any(host.done > other.done for other in self.hosts)
            if host.writing is not None or (not is_ahead and copied == host.done):
                found.append((self.advance, stage))
            if there.copying is not None or copied + 1 in steps(host.own):
                found.append((self.copy, stage))
        return found

    def advance(self, stage: int) -> None:
        """Let a stage start to write its next snapshot, or finish it."""
        host = self.hosts[stage]
        if host.writing is None:
            host.writing = host.own.reserve()
            assert host.writing is not None
        else:
            host.own.commit(host.writing, host.done + 1, 0)
            host.writing = None

    def copy(self, stage: int) -> None:
        """Let the mirror start to copy the next snapshot, or finish it."""
        there = self.copies(stage)
        if there.copying is None:
            there.copying = there.mirror.reserve()
            assert there.copying is not None
        else:
            there.mirror.commit(there.copying, newest(there.mirror) + 1, 0)
            there.copying = None

    def holdings(self, lost: int | None) -> dict[str, HeldSnapshots]:
        """Return the servers' snapshots after one of them has restarted."""
        of = {holder: name for name, holder in zip(self.names, self.holders, strict=True)}
        return {
            name: HeldSnapshots()
            if index == lost
            else HeldSnapshots(steps(host.own), {of[index]: steps(host.mirror)})
            for index, (name, host) in enumerate(zip(self.names, self.hosts, strict=True))
        }

    def close(self) -> None:
        for host in self.hosts:
            host.close()


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(2, 5), st.lists(st.integers(0, 9), min_size=50, max_size=150))
def test_losing_any_one_host_loses_at_most_two_steps(count: int, events: list[int]) -> None:
    cluster = Cluster([f"host{index}" for index in range(count)])
    for event in events:
        may = cluster.may()
        happen, stage = may[event % len(may)]
        happen(stage)
        for lost in [None, *range(count)]:
            check(cluster, lost)
    cluster.close()


def test_stages_that_always_take_the_first_action_make_progress() -> None:
    cluster = Cluster(["h", "h", "i", "i"])
    for _ in range(16 * 40):
        happen, stage = cluster.may()[0]
        happen(stage)
        for lost in [None, *range(4)]:
            check(cluster, lost)
    assert min(host.done for host in cluster.hosts) >= 39
    cluster.close()


def check(cluster: Cluster, lost: int | None) -> None:
    """Check that the group can resume from a recent step with the remaining snapshots."""
    held = cluster.holdings(lost)
    furthest = max(host.done for host in cluster.hosts)
    assert min(host.done for host in cluster.hosts) >= furthest - 1
    found = newest_common(workers(*cluster.names), held, range(furthest + 1))
    if found is None:
        assert furthest <= 2
        return
    assert found.step >= furthest - (1 if lost is None else 2)
    assert list(found.holders) == cluster.names
    for stage, holder in found.holders.items():
        if found.step in held[stage].own:
            assert holder == stage
        else:
            assert found.step in held[holder].mirrored[stage]
    for later in range(found.step + 1, furthest + 1):
        assert any(
            later not in held[stage].own
            and not any(later in held[other].mirrored.get(stage, ()) for other in held)
            for stage in cluster.names
        )


# Neighbours


@pytest.mark.parametrize(
    ("machines", "found"),
    [
        ("", []),
        ("a", [None]),
        ("ab", [1, 0]),
        ("aa", [1, 0]),
        ("abc", [1, 2, 0]),
        ("abab", [1, 2, 3, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aaabbb", [3, 4, 5, 0, 1, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abba", [2, 3, 0, 1]),
        ("aaaa", [1, 2, 3, 0]),
        ("aab", [1, 2, 0]),
    ],
)
def test_the_mirror_is_the_next_stage_on_another_machine(
    machines: str, found: list[int | None]
) -> None:
    assert mirrors(list(machines), range(len(machines))) == found


@pytest.mark.parametrize(
    ("machines", "stages", "has_files", "found"),
    [
        ("ab", "00", False, [None, None]),  # each has what the other has
        ("aa", "00", False, [None, None]),
        ("ab", "00", True, [1, None]),  # but one file fits to a checkpoint
        ("aabb", "0011", False, [2, None, 0, None]),  # one speaks for both of a machine
        ("abab", "0011", False, [None] * 4),
        ("abc", "001", False, [None, None, 0]),
    ],
)
def test_replicas_need_no_mirror(
    machines: str, stages: str, has_files: bool, found: list[int | None]
) -> None:
    assert mirrors(list(machines), list(map(int, stages)), has_files) == found


@pytest.mark.parametrize(
    ("guests", "found"), [("nny", [1, 2, 0]), ("nyyn", [2, 3, 0, 1]), ("yy", [1, 0])]
)
def test_no_guest_mirrors_a_guest_if_possible(guests: str, found: list[int | None]) -> None:
    count = len(guests)
    is_guest = [each == "y" for each in guests]
    assert mirrors(list("abcd"[:count]), range(count), is_guest=is_guest) == found


def test_the_copies_of_a_snapshot_are_at_those_that_mirror_it() -> None:
    one, *_ = WORKERS
    held = {
        "a": HeldSnapshots([3, 4], {"c": [3, 4]}),
        "b": HeldSnapshots([3, 4], {"a": [3]}, {1: HeldSnapshots([5], {"a": [5]})}),
        "c": HeldSnapshots([3, 4], {"b": [3, 4]}),
    }
    assert mirrored_by(one, 3, 0, held) == ["b"]
    assert mirrored_by(one, 4, 0, held) == []
    assert mirrored_by(one, 5, 1, held) == ["b"]


def test_a_replica_holds_the_snapshot_of_a_lost_one() -> None:
    pair = workers("a", replicas=2)
    held = {"a:0": HeldSnapshots([]), "a:1": HeldSnapshots([3, 4])}
    assert newest_common(pair, held, [3, 4]) == CommonSnapshot(4, {"a:0": "a:1", "a:1": "a:1"})


@examples(200)
@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=9))
def test_every_server_mirrors_one_worker_on_another_machine_if_possible(
    machines: list[str],
) -> None:
    found = mirrors(machines, range(len(machines)))
    count = len(machines)
    assert sorted(holder for holder in found if holder is not None) == list(range(count))
    assert all(index != holder for index, holder in enumerate(found))

    def together(holders: Sequence[int | None]) -> int:
        pairs = enumerate(holders)
        return sum(holder is not None and machines[i] == machines[holder] for i, holder in pairs)

    shifts = [[(index + shift) % count for index in range(count)] for shift in range(1, count)]
    assert together(found) == min(map(together, shifts))
    assert found in shifts


def test_a_server_reports_what_it_holds_by_cut() -> None:
    held = HeldSnapshots.from_proto(
        [
            pb.Holding(steps=[3, 4]),
            pb.Holding(steps=[5], cut=2),
            pb.Holding(stage_name="b", steps=[4]),
            pb.Holding(stage_name="b", steps=[5, 6], cut=2),
        ]
    )
    assert (held.own, held.mirrored) == ([3, 4], {"b": [4]})
    assert held.of_cut(0) is held
    assert held.of_cut(1) == HeldSnapshots()
    assert held.of_cut(2) == HeldSnapshots([5], {"b": [5, 6]})


def test_a_cut_that_came_back_has_all_its_steps() -> None:
    slots = Slots.create()
    for step, cut in [(57, 0), (60, 1), (65, 0)]:
        slot = slots.reserve()
        assert slot is not None
        slots.commit(slot, step, 0, cut=cut)
    assert slots.by_cut() == {0: [57, 65], 1: [60]}
    slots.close()
    cuts = [(0, [50, 57]), (1, [60]), (0, [65])]
    held = HeldSnapshots.from_proto(pb.Holding(cut=cut, steps=steps) for cut, steps in cuts)
    assert list(held.own) == [50, 57, 65]
    assert list(held.of_cut(1).own) == [60]


def test_a_step_that_is_taken_again_under_another_cut_keeps_the_former() -> None:
    slots = Slots.create()
    taken = []
    for step, cut in [(6, 0), (7, 0), (7, 1), (7, 1), (8, 1)]:
        slot = slots.reserve()
        assert slot is not None
        taken.append(slots.commit(slot, step, 0, cut=cut))
    assert slots.get(7, 0) == taken[1]
    assert slots.get(7, 1) == taken[3]
    assert slots.holds(taken[1])
    assert not slots.holds(taken[2])
    slot = slots.reserve()  # neither of them, while step 9 is written
    assert slot is not None
    assert slots.by_cut()[0][-1] == 7
    assert slots.by_cut()[1] == [7, 8]
    slots.close()
