"""Snapshots in shared memory stay whole while the next one is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.checkpoint.slots import NUM_SLOTS, RETAINED, Slots, Snapshot
from tests.support.examples import examples


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots.create()
    yield made
    made.close()


def begun(slots: Slots) -> int:
    slot = slots.reserve()
    assert slot is not None
    return slot


def write(slots: Slots, step: int, pin: bool = False, content: bytes | None = None) -> Snapshot:
    slot = begun(slots)
    data = content or f"of step {step}".encode()
    os.ftruncate(slots.fd(slot), len(data))
    os.pwrite(slots.fd(slot), data, 0)
    return slots.commit(slot, step, len(data), pin)


def read(slots: Slots, step: int) -> bytes:
    found = slots.get(step)
    assert found is not None
    return os.pread(slots.fd(found.slot), found.length, 0)


def steps(slots: Slots) -> list[int]:
    return [snapshot.step for snapshot in slots.all()]


def test_new_slots_are_empty(slots: Slots) -> None:
    assert len(slots) == NUM_SLOTS
    assert slots.all() == []
    assert slots.get(0) is None
    assert [os.fstat(slots.fd(slot)).st_size for slot in range(NUM_SLOTS)] == [0] * NUM_SLOTS


def test_a_snapshot_is_found_by_its_step_with_its_metadata(slots: Slots) -> None:
    written = [write(slots, 2**40, content=b"large"), write(slots, 2**40 + 1, pin=True)]
    assert [slots.get(2**40), slots.get(2**40 + 1)] == written
    assert slots.get(2**40 + 2) is None
    assert (written[0].length, written[0].is_pinned, written[1].is_pinned) == (5, False, True)
    assert read(slots, 2**40) == b"large"


def test_snapshots_come_oldest_first_in_whichever_slots_they_are(slots: Slots) -> None:
    for step in range(1, 8):
        write(slots, step)
    found = slots.all()
    assert [snapshot.step for snapshot in found] == [5, 6, 7]
    assert [snapshot.slot for snapshot in found] != sorted(snapshot.slot for snapshot in found)


def test_a_slots_memory_can_be_opened_by_its_path(slots: Slots) -> None:
    written = write(slots, 3, content=b"\0bytes\xff")
    with open(slots.path(written.slot), "rb") as file:
        assert file.read() == b"\0bytes\xff"


# What stays


def test_three_slots_without_pins_are_written_in_turn(slots: Slots) -> None:
    used = [write(slots, step).slot for step in range(1, 13)]
    assert len(set(used)) == RETAINED + 1
    assert used == used[: RETAINED + 1] * 4


def test_there_is_no_slot_while_all_are_needed(slots: Slots) -> None:
    for step in range(1, NUM_SLOTS + 1):
        write(slots, step, pin=step <= NUM_SLOTS - RETAINED)
    for _ in range(2):
        assert slots.reserve() is None
        assert steps(slots) == [1, 2, 3, 4, 5]
    middle = slots.get(2)
    assert middle is not None
    slots.unpin(middle)
    assert slots.reserve() == middle.slot
    assert steps(slots) == [1, 3, 4, 5]


def test_the_newest_are_kept_pinned_or_not(slots: Slots) -> None:
    for step in range(1, NUM_SLOTS + 1):
        write(slots, step, pin=True)
    for snapshot in slots.all()[-RETAINED:]:
        slots.unpin(snapshot)
    assert slots.reserve() is None
    assert steps(slots) == [1, 2, 3, 4, 5]


# What goes


def test_clearing_gives_the_memory_back(slots: Slots) -> None:
    for step in range(1, 4):
        write(slots, step, pin=step == 1, content=bytes(100_000))
    assert sum(os.fstat(slots.fd(slot)).st_size > 0 for slot in range(NUM_SLOTS)) == 3
    slots.free_memory()
    assert slots.all() == []
    for slot in range(NUM_SLOTS):
        stat = os.fstat(slots.fd(slot))
        assert (stat.st_size, stat.st_blocks) == (0, 0)
    write(slots, 1)
    assert steps(slots) == [1]


def test_closing_closes_every_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = Slots.create()
    assert len(os.listdir("/proc/self/fd")) > before
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.fd(0))


# Two processes


def test_two_objects_over_the_same_slots_see_the_same_snapshots(slots: Slots) -> None:
    other = Slots([os.dup(fd) for fd in slots.fds])
    write(slots, 1, content=b"from here")
    assert other.all() == slots.all()
    assert read(other, 1) == b"from here"
    write(other, 2, pin=True)
    assert slots.all() == other.all()
    found = other.get(1)
    assert found is not None
    slots.pin(found.slot)
    assert [snapshot.is_pinned for snapshot in other.all()] == [True, True]
    other.truncate_after(1)
    assert steps(slots) == [1]
    other.close()
    assert read(slots, 1) == b"from here"


def test_a_snapshot_keeps_the_number_of_its_cut(slots: Slots) -> None:
    other = Slots([os.dup(fd) for fd in slots.fds])
    write(slots, 4)
    slots.commit(begun(slots), 5, 0, pin=True, cut=7)
    assert [(found.step, found.cut, found.is_pinned) for found in other.all()] == [
        (4, 0, False),
        (5, 7, True),
    ]
    other.unpin(other.all()[1])
    assert [(found.cut, found.is_pinned) for found in slots.all()] == [(0, False), (7, False)]
    slots.commit(begun(slots), 5, 0)  # the same step, of another cut: both stay
    assert other.by_cut() == {0: [4, 5], 7: [5]}
    other.close()


# All of it


@dataclass
class Model:
    """Expected state of the slots: content and pin of each step."""

    content: dict[int, bytes] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    @property
    def needed(self) -> set[int]:
        """Steps that a writer must not take."""
        return self.pinned | set(sorted(self.content)[-RETAINED:])

    def drop(self, dropped: set[int]) -> None:
        for step in dropped:
            del self.content[step]
        self.pinned -= dropped


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "save", "die"]), st.integers(1, 3)),
        st.tuples(st.just("again"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["pin", "unpin"]), st.integers(0, NUM_SLOTS - 1)),
        st.tuples(st.just("truncate"), st.integers(0, 4)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=60,
)


@examples(300)
@given(OPERATIONS)
def test_nothing_that_is_needed_is_ever_lost(operations: list[tuple[str, int]]) -> None:
    slots, model = Slots.create(), Model()
    for number, (operation, argument) in enumerate(operations):
        newest = max(model.content, default=0)
        match operation:
            case "write" | "save" | "die" | "again":
                step = max(1, newest - argument) if operation == "again" else newest + argument
                _write(slots, model, step, b"%d" % number, operation)
            case "pin" | "unpin":
                found = next((each for each in slots.all() if each.slot == argument), None)
                if found is not None and operation == "pin":
                    slots.pin(argument)
                    model.pinned.add(found.step)
                elif found is not None:
                    slots.unpin(found)
                    model.pinned.discard(found.step)
            case "truncate":
                slots.truncate_after(newest - argument)
                model.drop({step for step in model.content if step > newest - argument})
            case "clear":
                slots.free_memory()
                model.drop(set(model.content))
        assert {each.step: each.is_pinned for each in slots.all()} == {
            step: step in model.pinned for step in sorted(model.content)
        }
        assert {step: read(slots, step) for step in model.content} == model.content
    slots.close()


def _write(slots: Slots, model: Model, step: int, content: bytes, operation: str) -> None:
    """Write a snapshot, or only start to; records which one it replaced."""
    slot = slots.reserve()
    if slot is None:
        assert len(model.needed) == NUM_SLOTS
        return
    lost = set(model.content) - set(steps(slots))
    assert len(lost) <= 1
    assert not lost & model.needed
    model.drop(lost)
    os.ftruncate(slots.fd(slot), 0)  # all that was here is gone
    os.pwrite(slots.fd(slot), content, 0)
    if operation != "die":
        slots.commit(slot, step, len(content), pin=operation == "save")
        model.drop({other for other in model.content if other >= step})
        model.content[step] = content
        if operation == "save":
            model.pinned.add(step)
