"""Shared memory for a stage's snapshots: owned by its supervisor, written by its workers.

    index   one page: for each slot its step, its length, whether it is whole, whether it is kept
    slots   memfds; each holds one snapshot as the bytes of a safetensors file, or nothing

A worker that dies leaves all that it has written: its successor inherits the same descriptors and
maps them. memfds count as the processes' memory, need no room in /dev/shm and no name.

**How many are needed.** A stage that has done step M knows that all others have done M - 1 at
least; and each has a neighbour hold its M - 1 before it writes its own M, or is a replica whose
twin has done M - 1, since they sum the gradients of M together. So when a stage writes M + 1,
everybody has M, and M - 1 can be had even if one host is gone: while one slot is written the
newest two stay whole. Two more are there for snapshots that are being saved to a slow disk
meanwhile. An unused slot costs nothing.

Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.process import descriptors

NUM_SLOTS = 5
"""Written in turn, `RETAINED` + 1 of them while none is pinned."""

RETAINED = 2
"""Newest snapshots that must not be overwritten while the next one is written."""

_RECORD = struct.Struct("<QQBB")
_PINNED = _RECORD.size - 1
_SPACING = 32


def memory_name(number: int) -> str:
    """What /proc calls the index, 0, and the slots, from 1 on."""
    return f"rpcmp-snapshot-{number}"


@dataclass(frozen=True)
class Snapshot:
    """What a slot holds.

    Attributes:
        slot: its index.
        step: the optimizer step after which the stage was like this.
        length: bytes.
        is_pinned: whether it has to stay until it is saved to a disk.
    """

    slot: int
    step: int
    length: int
    is_pinned: bool


class Slots:
    """A stage's snapshots in memory, as supervisor and worker both see them.

    Args:
        fds: of the index and of the slots; owned from now on.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._index = mmap.mmap(self.fds[0], mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Slots:
        """Empty slots."""
        index = descriptors.memory(memory_name(0), mmap.PAGESIZE)
        return cls([index, *(os.memfd_create(memory_name(1 + n)) for n in range(NUM_SLOTS))])

    def __len__(self) -> int:
        return len(self.fds) - 1

    def fd(self, slot: int) -> int:
        """The memory of a slot."""
        return self.fds[1 + slot]

    def path(self, slot: int) -> str:
        """A file name under which this process can open a slot."""
        return f"/proc/self/fd/{self.fd(slot)}"

    def all(self) -> list[Snapshot]:
        """The snapshots that are whole, oldest first."""
        found = []
        for slot in range(len(self)):
            step, length, is_whole, is_pinned = _RECORD.unpack_from(self._index, slot * _SPACING)
            if is_whole:
                found.append(Snapshot(slot, step, length, bool(is_pinned)))
        return sorted(found, key=lambda snapshot: snapshot.step)

    def get(self, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return next((found for found in self.all() if found.step == step), None)

    def begin(self) -> int | None:
        """A slot to write to, whose snapshot is gone from now on; None while all are needed."""
        snapshots = self.all()
        used = {snapshot.slot for snapshot in snapshots}
        loose = snapshots[: max(0, len(snapshots) - RETAINED)]
        oldest = next((found.slot for found in loose if not found.is_pinned), None)
        unused = next((slot for slot in range(len(self)) if slot not in used), None)
        slot = unused if oldest is None else oldest
        if slot is not None:
            self._record(slot, 0, 0)
        return slot

    def commit(self, slot: int, step: int, length: int, pin: bool = False) -> Snapshot:
        """Note that a slot holds a whole snapshot.

        A snapshot that the slots had of the same step or of a later one is of a time that was
        undone, and goes.
        """
        for other in self.all():
            if other.step >= step:
                self._record(other.slot, 0, 0)
        self._record(slot, step, length, is_whole=True, is_pinned=pin)
        return Snapshot(slot, step, length, pin)

    def pin(self, slot: int) -> None:
        """Keep a slot from being overwritten; for who writes them."""
        self._index[slot * _SPACING + _PINNED] = 1

    def unpin(self, snapshot: Snapshot) -> None:
        """Let a snapshot be overwritten again, if its slot still holds it."""
        if self.holds(snapshot):
            self._index[snapshot.slot * _SPACING + _PINNED] = 0

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is still what it was, pinned or not."""
        found = self.get(snapshot.step)
        return found is not None and found.slot == snapshot.slot

    def drop(self) -> None:
        """Drop all; who still reads one finds that it does not hold any more."""
        self.truncate_after(-1)

    def truncate_after(self, step: int) -> None:
        """Drop the snapshots of later steps, which are to be done again."""
        for snapshot in self.all():
            if snapshot.step > step:
                self._record(snapshot.slot, 0, 0)

    def clear(self) -> None:
        """Drop all, and give their memory back."""
        for slot in range(len(self)):
            self._record(slot, 0, 0)
            os.ftruncate(self.fd(slot), 0)

    def close(self) -> None:
        """Close all descriptors."""
        self._index.close()
        for fd in self.fds:
            os.close(fd)

    def _record(
        self,
        slot: int,
        step: int,
        length: int,
        is_whole: bool = False,
        is_pinned: bool = False,
    ) -> None:
        _RECORD.pack_into(self._index, slot * _SPACING, step, length, is_whole, is_pinned)
