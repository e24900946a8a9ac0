"""The step that a generation restores, chosen from the snapshots that the stage servers hold. Pure.

Each worker's last snapshots are in the memory of its own server. Another replica of its stage holds
the same state; without one, a mirror on another server does. The group restores the newest step
that every worker can be brought to. `checkpoint.slots` proves that there is one as long as no more
than one host is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.v1 import control_pb2 as pb


@dataclass(frozen=True)
class HeldSnapshots:
    """The snapshots that one worker's server holds.

    Attributes:
        own: the steps of its own stage.
        mirrored: the steps of another stage, by that stage's name.
    """

    own: Collection[int] = ()
    mirrored: Mapping[str, Collection[int]] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, holdings: Iterable[pb.Holding]) -> HeldSnapshots:
        """Return what a stage server reports; its own stage has an empty name there."""
        by_name = {holding.stage_name: list(holding.steps) for holding in holdings}
        return cls(by_name.pop("", []), by_name)


@dataclass(frozen=True)
class CommonSnapshot:
    """A step that every worker can restore.

    Attributes:
        step: which one.
        holders: by worker, the worker whose server has the snapshot; itself if its own server does.
    """

    step: int
    holders: dict[str, str]


@dataclass(frozen=True)
class RestorePoint:
    """The state that a generation starts from.

    Attributes:
        step: optimizer steps done.
        restores: the state of each worker, by its label; empty: all start from the config.
    """

    step: int = 0
    restores: Mapping[str, pb.Restore] = field(default_factory=dict)

    @classmethod
    def in_memory(
        cls, common: CommonSnapshot, workers: Sequence[Member], addresses: Sequence[str]
    ) -> RestorePoint:
        """Return the restore point of a step that the servers hold.

        Args:
            common: the step and its holders.
            addresses: their servers, in the same order.
        """
        address_of = {w.label: address for w, address in zip(workers, addresses, strict=True)}
        return cls(
            common.step,
            {
                label: pb.Restore(
                    step=common.step, address="" if holder == label else address_of[holder]
                )
                for label, holder in common.holders.items()
            },
        )


ChooseRestorePoint = Callable[[list[str], dict[str, HeldSnapshots]], Awaitable[RestorePoint]]
"""Takes the workers' assignments and the snapshots that their servers hold, by worker."""


async def from_config(assignments: list[str], holdings: dict[str, HeldSnapshots]) -> RestorePoint:
    return RestorePoint()


def newest_common(
    workers: Sequence[Member], holdings: Mapping[str, HeldSnapshots], known: Collection[int]
) -> CommonSnapshot | None:
    """Return the newest step of which every worker's snapshot is in some server's memory.

    Args:
        holdings: the snapshots that each worker's server holds, by the worker's label.
        known: the steps of which the driver has its own state.
    """
    holders = {worker.label: _holders_by_step(worker, workers, holdings) for worker in workers}
    common = set(known).intersection(*holders.values())
    if not common:
        return None
    step = max(common)
    return CommonSnapshot(step, {label: by_step[step] for label, by_step in holders.items()})


def mirrors(
    machines: Sequence[str], stages: Sequence[int], has_files: bool = False
) -> list[int | None]:
    """Return for each worker the index of the worker whose server mirrors its snapshots.

    This is the next worker on another machine, or else the next worker. It is None if there is only
    one worker, or if another replica of the stage already has the same state. Replica 0 needs that
    replica on another machine, unless there is only one machine.

    Every server mirrors at most one other worker. If machines alternate (a, b, a, b), the next
    worker is on another machine anyway. If neighbours share a machine, all mirrors are shifted by
    the same number of workers.

    Args:
        machines: the machine of each worker's server.
        stages: the stage of each worker.
        has_files: whether mirrors have files of the snapshots: only the bits of replica 0 match a
            checkpoint.
    """
    count = len(machines)
    if count < 2:
        return [None] * count

    def has_twin(index: int) -> bool:
        twins = [i for i in range(count) if i != index and stages[i] == stages[index]]
        if any(i < index for i in twins):
            return True
        is_alone = len(set(machines)) == 1
        return not has_files and any(is_alone or machines[i] != machines[index] for i in twins)

    def on_same_machine(shift: int) -> int:
        return sum(machines[i] == machines[(i + shift) % count] for i in range(count))

    shift = min(range(1, count), key=on_same_machine)
    return [None if has_twin(i) else (i + shift) % count for i in range(count)]


def mirrors_of(config: Config, machines: Sequence[str]) -> list[int | None]:
    """Return the mirrors of a job's workers as its config asks for them; see `mirrors`."""
    recovery, section = config.recovery, config.checkpoint
    if not recovery.enabled or recovery.mirror_every_steps == 0:
        return [None] * len(machines)
    has_files = section is not None and not section.shared
    return mirrors(machines, [worker.stage_index for worker in config.workers], has_files)


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
        if other.stage == worker.stage
        for step in holdings[other.label].own
    }
    return mirrors | twins | dict.fromkeys(holdings[worker.label].own, worker.label)
