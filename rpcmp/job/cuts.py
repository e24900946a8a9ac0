"""The cuts of a model into stages that a run has had, and what of them its servers hold.

    cut 0   stage0 [a b]   stage1 [c d]      snapshots of steps 1 2 3, of cut 0
    cut 1   stage0 [a]     stage1 [b c d]    starts from step 3: stage1 has b from stage0's snapshot
                                             and c, d from its own; snapshots of steps 4 ...

Snapshots go by layer, as files of checkpoints do, so any cut can start from a step of any other.
Hosts may have joined or left in between, so that a cut may have other stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rpcmp.checkpoint.slots import CommonSnapshot, HeldSnapshots, newest_common
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.v1 import control_pb2 as pb

Layers = dict[str, list[str]]
"""The layers of each stage, by its name."""


class HeldStep(NamedTuple):
    """A step that servers hold of all stages.

    Attributes:
        cut: the number of the cut that its snapshots are of.
    """

    common: CommonSnapshot
    cut: int


class Cuts:
    """The cuts of one run, numbered from 0.

    Attributes:
        known: the layers of each.
        current: the number of the newest generation's.
    """

    def __init__(self, known: Sequence[Layers] = ()) -> None:
        self.known = list(known)
        self.current = 0

    @property
    def layers(self) -> Layers:
        """The layers of each stage now; empty before the first cut."""
        return self.known[self.current] if self.known else {}

    def change_to(self, layers: Layers) -> None:
        """Let the next generation have this cut, which may have been one before."""
        if layers not in self.known:
            self.known.append(layers)
        self.current = self.known.index(layers)

    def newest(
        self,
        workers: Sequence[Member],
        holdings: Mapping[str, HeldSnapshots],
        steps: Collection[int],
        of_any: bool = True,
    ) -> HeldStep | None:
        """Return the newest of `steps` that servers hold; see `newest_common`.

        Args:
            of_any: whether under any cut, or only under the current one.
        """
        found = []
        for cut in range(len(self.known)) if of_any else [self.current]:
            of_cut = {label: held.of_cut(cut) for label, held in holdings.items()}
            members = self.members(cut, workers)
            if (common := newest_common(members, of_cut, steps)) is not None:
                found.append(HeldStep(common, cut))
        return max(found, key=lambda one: (one.common.step, one.cut == self.current), default=None)

    def members(self, cut: int, workers: Sequence[Member]) -> Sequence[Member]:
        """Return the workers of a cut; `workers`: of the current one."""
        names = list(self.known[cut]) if self.known else [worker.stage for worker in workers]
        if set(names) == {worker.stage for worker in workers}:
            return workers
        return [Member(name, index) for index, name in enumerate(names)]  # it had no replicas

    def restores(
        self, held: HeldStep, workers: Sequence[Member], addresses: Sequence[str]
    ) -> dict[str, pb.Restore]:
        """Return how each worker gets its layers' state after a step that servers hold."""
        if held.cut == self.current:
            return restores_of(held.common, workers, addresses)
        restores, members = {}, self.members(held.cut, workers)
        for worker in workers:
            restore = restores[worker.label] = pb.Restore(step=held.common.step)
            for stage, layers in self.known[held.cut].items():
                if set(layers).isdisjoint(self.layers[worker.stage]):
                    continue
                # Its own, if it had that stage: replicas hold the same.
                of = next(each for each in (worker, *members) if each.stage == stage)
                address = _address(held.common, of, worker, workers, addresses)
                restore.parts.append(pb.Part(stage_name=stage, cut=held.cut, address=address))
        return restores


def with_stages(config: Config, counts: Mapping[str, int]) -> Config:
    """Return a job with these numbers of layers at stages of these names.

    Those that the config does not know get the settings that its stages share; see `rebalance`.
    """
    known = dict(zip(config.stage_names, config.stages, strict=False))
    shared = config.stage(0).model_copy(update={"addresses": [], "memory": None})
    stages = [known.get(name, shared).model_copy(update={"name": name}) for name in counts]
    if not all(stage.addresses for stage in stages):  # all have them, or none
        stages = [stage.model_copy(update={"addresses": []}) for stage in stages]
    config = config.model_copy(update={"stages": stages}).with_balance(list(counts.values()))
    model = config.model and config.model.model_copy(update={"num_stages": None})
    return config.model_copy(update={"model": model})


def restores_of(
    common: CommonSnapshot, workers: Sequence[Member], addresses: Sequence[str]
) -> dict[str, pb.Restore]:
    """Return how each worker gets its own stage's state after a step that servers hold."""
    return {
        worker.label: pb.Restore(
            step=common.step, address=_address(common, worker, worker, workers, addresses)
        )
        for worker in workers
    }


def _address(
    common: CommonSnapshot,
    of: Member,
    reader: Member,
    workers: Sequence[Member],
    addresses: Sequence[str],
) -> str:
    """Return where `reader` fetches a worker's snapshot; empty if its own server has it."""
    holder = common.holders[of.label]
    at = next(i for i, worker in enumerate(workers) if worker.label == holder)
    return "" if holder == reader.label else addresses[at]
