"""Shared memory for a stage's snapshots: owned by its supervisor, written by its workers.

    index   one page: for each slot its step, its length, whether it is complete and pinned
    slots   memfds; each holds one snapshot as the bytes of a safetensors file, or nothing

Snapshots outlive a worker that dies: its successor inherits the same descriptors and maps them.
memfds count as the processes' memory, need no room in /dev/shm and no name.

**How many are needed.** A stage that has done step M knows that all others have done at least
M - 1. Each stage waits until a neighbour holds its M - 1 before it writes its own M, unless it is a
replica: then its twin has done M - 1, since they sum the gradients of M together. So when a stage
writes M + 1, every stage has M, and M - 1 is available even if one host is lost: while one slot is
written, the newest two stay complete. Two more slots are for snapshots that are being saved to a
slow disk meanwhile. An unused slot costs nothing.

Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.process import resources

NUM_SLOTS = 5
"""Written in turn, `RETAINED` + 1 of them while none is pinned."""

RETAINED = 2
"""Newest snapshots that must not be overwritten while the next one is written."""

_RECORD = struct.Struct("<QQBB")
_PINNED = _RECORD.size - 1
_SPACING = 32


def memory_name(number: int) -> str:
    """Return the name that /proc shows for the index, number 0, and the slots, from 1 on."""
    return f"rpcmp-snapshot-{number}"


@dataclass(frozen=True)
class Snapshot:
    """The content of a slot.

    Attributes:
        length: bytes.
        is_pinned: whether it must stay until it is saved to a disk.
    """

    slot: int
    step: int
    length: int
    is_pinned: bool


class Slots:
    """A stage's snapshots in memory, as supervisor and worker both see them.

    Args:
        fds: descriptors of the index and of the slots; `close` closes them.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._index = mmap.mmap(self.fds[0], mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Slots:
        index = resources.shared_memory(memory_name(0), mmap.PAGESIZE)
        return cls([index, *(os.memfd_create(memory_name(1 + n)) for n in range(NUM_SLOTS))])

    def __len__(self) -> int:
        return len(self.fds) - 1

    def fd(self, slot: int) -> int:
        return self.fds[1 + slot]

    def path(self, slot: int) -> str:
        """Return a file name under which this process can open a slot."""
        return f"/proc/self/fd/{self.fd(slot)}"

    def all(self) -> list[Snapshot]:
        found = []
        for slot in range(len(self)):
            step, length, is_whole, is_pinned = _RECORD.unpack_from(self._index, slot * _SPACING)
            if is_whole:
                found.append(Snapshot(slot, step, length, bool(is_pinned)))
        return sorted(found, key=lambda snapshot: snapshot.step)

    def get(self, step: int) -> Snapshot | None:
        return next((found for found in self.all() if found.step == step), None)

    def begin(self) -> int | None:
        """Return a slot to write to and drop its snapshot; None while all are needed."""
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
        """Record that a slot holds a complete snapshot.

        Snapshots of the same or a later step belong to steps that were undone, and are dropped.
        """
        for other in self.all():
            if other.step >= step:
                self._record(other.slot, 0, 0)
        self._record(slot, step, length, is_whole=True, is_pinned=pin)
        return Snapshot(slot, step, length, pin)

    def pin(self, slot: int) -> None:
        self._index[slot * _SPACING + _PINNED] = 1

    def unpin(self, snapshot: Snapshot) -> None:
        """Allow a snapshot to be overwritten again, if its slot still holds it."""
        if self.holds(snapshot):
            self._index[snapshot.slot * _SPACING + _PINNED] = 0

    def holds(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot has not been overwritten or dropped."""
        found = self.get(snapshot.step)
        return found is not None and found.slot == snapshot.slot

    def drop(self) -> None:
        """Drop all; a process that is reading one can check with `holds`."""
        self.truncate_after(-1)

    def truncate_after(self, step: int) -> None:
        """Drop the snapshots of later steps, which will be repeated."""
        for snapshot in self.all():
            if snapshot.step > step:
                self._record(snapshot.slot, 0, 0)

    def clear(self) -> None:
        for slot in range(len(self)):
            self._record(slot, 0, 0)
            os.ftruncate(self.fd(slot), 0)

    def close(self) -> None:
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
