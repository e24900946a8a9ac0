"""A stage's snapshots in shared memory, and the step that a group can restore from them.

    index   one page: for each slot its step, its length, whether it is complete and pinned, its cut
    slots   memfds; each holds one snapshot as the bytes of a safetensors file, or nothing

A supervisor owns them and its workers write them, so they outlive a worker that dies: its successor
inherits the same descriptors and maps them. memfds count as the processes' memory, need no room in
/dev/shm and no name.

**How many are needed.** A stage that has done step M knows that all others have done at least
M - 1. Each stage waits until a neighbour holds its M - 1 before it writes its own M, unless it is a
replica: then its twin has done M - 1, since they sum the gradients of M together. So when a stage
writes M + 1, every stage has M, and M - 1 is available even if one host is lost: while one slot is
written, the newest two stay complete. Two more slots are for snapshots that are being saved to a
slow disk meanwhile. An unused slot costs nothing.

**Which step is restored.** The newest that every worker can be brought to: from its own server,
from another replica of its stage, which holds the same state, or from its mirror. Nothing here
imports torch.

**Cuts.** A run may move layers between stages, so each snapshot has the number of the model's cut
that it was taken under. Steps count on across cuts, so all of this holds. A step that is taken
again under another cut keeps its snapshot of the former: other stages may hold no newer one.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rpcmp.process import resources

if TYPE_CHECKING:
    from rpcmp.config.schema import Config
    from rpcmp.config.topology import Member
    from rpcmp.v1 import control_pb2 as pb

NUM_SLOTS = 5
"""Written in turn, `RETAINED` + 1 of them while none is pinned."""

RETAINED = 2
"""Newest snapshots that must not be overwritten while the next one is written."""

MIRRORED_BY_ALL = 4
"""Snapshots of a stage in a group, after which each of the others has one that is mirrored: the
others have done the third step, so they have written their second, for which the first had to be
mirrored."""

_RECORD = struct.Struct("<QQBBI")
_PINNED = struct.calcsize("<QQB")
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
        cut: the number of the cut of the model that it was taken under.
    """

    slot: int
    step: int
    length: int
    is_pinned: bool
    cut: int = 0


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
            record = _RECORD.unpack_from(self._index, slot * _SPACING)
            step, length, is_whole, is_pinned, cut = record
            if is_whole:
                found.append(Snapshot(slot, step, length, bool(is_pinned), cut))
        return sorted(found, key=lambda snapshot: snapshot.step)

    def by_cut(self) -> dict[int, list[int]]:
        """Return the steps of the snapshots of each cut, which may have come back."""
        steps: defaultdict[int, list[int]] = defaultdict(list)
        for snapshot in self.all():
            steps[snapshot.cut].append(snapshot.step)
        return steps

    def get(self, step: int, cut: int | None = None) -> Snapshot | None:
        """Return the snapshot of a step, of any cut if that is None."""
        of_step = (found for found in self.all() if found.step == step)
        return next((found for found in of_step if cut in (None, found.cut)), None)

    def reserve(self) -> int | None:
        """Return a slot to write to, without its snapshot; None if every slot must be kept."""
        snapshots = self.all()
        used = {snapshot.slot for snapshot in snapshots}
        kept = sorted({snapshot.step for snapshot in snapshots})[-RETAINED:]
        loose = [found for found in snapshots if found.step not in kept]
        oldest = next((found.slot for found in loose if not found.is_pinned), None)
        unused = next((slot for slot in range(len(self)) if slot not in used), None)
        slot = unused if oldest is None else oldest
        if slot is not None:
            self._record(slot, 0, 0)
        return slot

    def commit(
        self, slot: int, step: int, length: int, pin: bool = False, cut: int = 0
    ) -> Snapshot:
        """Record that a slot holds a complete snapshot.

        Snapshots of the same or a later step belong to steps that were undone, and are dropped; but
        not one of the same step and another cut, of which other stages may hold no newer one.
        """
        for other in self.all():
            if other.step > step or (other.step, other.cut) == (step, cut):
                self._record(other.slot, 0, 0)
        self._record(slot, step, length, is_whole=True, is_pinned=pin, cut=cut)
        return Snapshot(slot, step, length, pin, cut)

    def pin(self, slot: int) -> None:
        self._index[slot * _SPACING + _PINNED] = 1

    def unpin(self, snapshot: Snapshot) -> None:
        """Allow a snapshot to be overwritten again, if its slot still holds it."""
        if self.holds(snapshot):
            self._index[snapshot.slot * _SPACING + _PINNED] = 0

    def holds(self, snapshot: Snapshot) -> bool:
        found = self.get(snapshot.step, snapshot.cut)
        return found is not None and found.slot == snapshot.slot

    def drop_all(self) -> None:
        """Drop all; a process that is reading one can check with `holds`."""
        self.truncate_after(-1)

    def truncate_after(self, step: int) -> None:
        """Drop the snapshots of later steps, which will be repeated."""
        for snapshot in self.all():
            if snapshot.step > step:
                self._record(snapshot.slot, 0, 0)

    def free_memory(self) -> None:
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
        cut: int = 0,
    ) -> None:
        _RECORD.pack_into(self._index, slot * _SPACING, step, length, is_whole, is_pinned, cut)


@dataclass(frozen=True)
class HeldSnapshots:
    """The snapshots that one worker's server holds.

    Attributes:
        own: the steps of its own stage.
        mirrored: the steps of another stage, by that stage's name.
        later_cuts: what it holds of cuts other than the run's first, by their numbers.
    """

    own: Collection[int] = ()
    mirrored: Mapping[str, Collection[int]] = field(default_factory=dict)
    later_cuts: Mapping[int, HeldSnapshots] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, holdings: Iterable[pb.Holding]) -> HeldSnapshots:
        """Build from a stage server's report, in which the server's own stage has an empty name."""
        by_cut: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
        for holding in holdings:
            by_cut[holding.cut].setdefault(holding.stage_name, []).extend(holding.steps)
        later = {cut: cls(held.pop("", []), held) for cut, held in by_cut.items() if cut}
        first = by_cut[0]
        return cls(first.pop("", []), first, later)

    def of_cut(self, cut: int) -> HeldSnapshots:
        return self.later_cuts.get(cut, HeldSnapshots()) if cut else self


@dataclass(frozen=True)
class CommonSnapshot:
    """A step that every worker can restore.

    Attributes:
        holders: by worker, the worker whose server has the snapshot; itself if its own server does.
    """

    step: int
    holders: dict[str, str]


def newest_common(
    workers: Sequence[Member], holdings: Mapping[str, HeldSnapshots], known: Collection[int]
) -> CommonSnapshot | None:
    """Return the newest step for which some server has each worker's snapshot in memory.

    Args:
        holdings: the snapshots that each worker's server holds, by the worker's label; those of
            other workers may hold all that is left of one that has left.
        known: the steps for which the driver has its own state.
    """
    holders = {worker.label: _holders_by_step(worker, workers, holdings) for worker in workers}
    common = set(known).intersection(*holders.values())
    if not common:
        return None
    step = max(common)
    return CommonSnapshot(step, {label: by_step[step] for label, by_step in holders.items()})


def mirrors(
    machines: Sequence[str],
    stages: Sequence[int],
    has_files: bool = False,
    is_guest: Sequence[bool] = (),
) -> list[int | None]:
    """Return for each worker the index of the worker whose server mirrors its snapshots.

    This is the next worker on another machine, or else the next worker. It is None if there is only
    one worker, or if another replica of the stage already has the same state. Replica 0 needs that
    replica on another machine, unless there is only one machine.

    Every server mirrors at most one other worker. If machines alternate (a, b, a, b), the next
    worker is on another machine anyway. If neighbours share a machine, all mirrors are shifted by
    the same number of workers. So they are where two neighbours are guests, a spare or a host that
    has joined: a run that is resumed does not look there for files.

    Args:
        machines: the machine of each worker's server.
        stages: the stage of each worker.
        has_files: whether mirrors also write checkpoint files, which must come from replica 0.
        is_guest: whether the worker's server is none of the config; none is when omitted.
    """
    count = len(machines)
    is_guest = is_guest or [False] * count
    if count < 2:
        return [None] * count

    def needs_no_mirror(index: int) -> bool:
        twins = [i for i in range(count) if i != index and stages[i] == stages[index]]
        if any(i < index for i in twins):
            return True
        is_alone = len(set(machines)) == 1
        return not has_files and any(is_alone or machines[i] != machines[index] for i in twins)

    def shortcomings(shift: int) -> tuple[int, int]:
        pairs = [(i, (i + shift) % count) for i in range(count)]
        on_same_machine = sum(machines[i] == machines[other] for i, other in pairs)
        return on_same_machine, sum(is_guest[i] and is_guest[other] for i, other in pairs)

    shift = min(range(1, count), key=shortcomings)
    return [None if needs_no_mirror(i) else (i + shift) % count for i in range(count)]


def mirrors_of(
    config: Config, machines: Sequence[str], is_guest: Sequence[bool] = ()
) -> list[int | None]:
    recovery, section = config.recovery, config.checkpoint
    if not recovery.enabled or recovery.mirror_every_steps == 0:
        return [None] * len(machines)
    has_files = section is not None and not section.shared
    return mirrors(machines, [worker.stage_index for worker in config.workers], has_files, is_guest)


def mirrored_by(
    worker: Member, step: int, cut: int, holdings: Mapping[str, HeldSnapshots]
) -> list[str]:
    """Return the workers whose servers hold another one's snapshot of a step."""
    return [
        name
        for name, held in holdings.items()
        if name != worker.label and step in held.of_cut(cut).mirrored.get(worker.stage, ())
    ]


def _holders_by_step(
    worker: Member, workers: Sequence[Member], holdings: Mapping[str, HeldSnapshots]
) -> dict[int, str]:
    """Return who holds a worker's snapshots: its own server if that does, then a replica's."""
    mirrors = {
        step: name
        for name, held in holdings.items()
        for step in held.mirrored.get(worker.stage, ())
        if name != worker.label
    }
    twins = {
        step: other.label
        for other in workers
        if other.stage == worker.stage and other.label in holdings
        for step in holdings[other.label].own
    }
    own = holdings.get(worker.label, HeldSnapshots()).own
    return mirrors | twins | dict.fromkeys(own, worker.label)
