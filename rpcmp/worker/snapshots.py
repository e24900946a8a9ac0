"""A stage's snapshots, taken after optimizer steps; the supervisor keeps them for a new worker.

    compute thread   step M ──> copy to a slot ──> step M + 1 ...
    supervisor                        └──> a mirror on another server; a disk, if it is due

A step only waits for the copy. It waits longer if the mirror or the disk is slower than a whole
step, because snapshots that recovery may need must not be overwritten; see `checkpoint.slots`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rpcmp.checkpoint.slots import Slots
from rpcmp.checkpoint.stage_state import SnapshotWriter, StageState, pack, unpack
from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.process.activity import Activity
from rpcmp.process.channel import Message
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.state.forward_state import LOOKS


class StageSnapshots:
    """Takes the snapshots of one stage.

    Args:
        is_mirrored: whether a mirror holds them as well, and acknowledges that.
        saves: whether they go to a disk when a checkpoint is due; not all replicas write files.
        send: sends a message to the supervisor.
        cut: the number of the cut of the model into stages.
    """

    def __init__(
        self,
        slots: Slots,
        model: StageModel,
        optimizer: StageOptimizer,
        activity: Activity,
        is_mirrored: bool,
        saves: bool,
        send: Callable[[Message], None],
        cut: int = 0,
    ) -> None:
        self._slots = slots
        self._writer = SnapshotWriter(slots, cut)
        self._model = model
        self._optimizer = optimizer
        self._activity = activity
        self._is_mirrored = is_mirrored
        self._saves = saves
        self._send = send
        self._cut = cut
        self._changed = threading.Condition()
        self._last = 0
        self._mirrored = 0

    def take(self, version: int, save: bool = False) -> None:
        """Take a snapshot of the stage's current state; on the compute thread.

        `version` is the step, or the number of calls if a program of the user calls the stages.
        """
        with self._activity.during("saving", self._optimizer.steps):
            slot = self._free_slot()
            try:
                tensors, about = pack(self._state())
            except TypeError as error:
                raise TypeError(
                    f"{error}: only tensors and JSON values of an optimizer or scheduler can be "
                    "restored after a fault; recovery.enabled = false, without [checkpoint], "
                    "trains without recovery"
                ) from error
            self._writer.write(slot, version, tensors, about, pin=save and self._saves)
        self._last = version
        self._send({"event": "snapshot", "step": version})

    def save(self, version: int) -> None:
        """Let the supervisor write the snapshot of `version` to a disk; take it first if needed."""
        snapshot = self._slots.get(version, self._cut)
        if snapshot is None:
            self.take(version, save=True)
        elif self._saves:
            self._slots.pin(snapshot.slot)
            self._send({"event": "snapshot", "step": version})

    def mark_mirrored(self, step: int) -> None:
        with self._changed:
            self._mirrored = max(step, self._mirrored)
            self._changed.notify_all()

    def mark_saved(self) -> None:
        """Called when a snapshot is on its disk and its slot free again."""
        with self._changed:
            self._changed.notify_all()

    def _free_slot(self) -> int:
        with self._changed:
            while self._is_mirrored and self._mirrored < self._last:
                self._changed.wait()
            while (slot := self._slots.reserve()) is None:
                self._changed.wait()
        return slot

    def _state(self) -> StageState:
        model, optimizer = self._model.state_dict(), self._optimizer
        if optimizer.steps <= LOOKS:
            self._model.require_unchanged_base()
        return StageState(
            optimizer.steps,
            optimizer.stage,
            model,
            *optimizer.parts(),
            base=self._model.base,
            attributes=self._model.attributes.read(),
        )


def restore(paths: Sequence[str], model: StageModel, optimizer: StageOptimizer) -> None:
    """Restore the state of a new stage from files or a slot, before the group starts."""
    state = unpack(paths, optimizer.stage, list(model.state_dict()), optimizer.names)
    for layer, checksum in model.base.items():
        if state.base is not None and state.base.get(layer) != checksum:
            raise CheckpointError(
                f"stage {optimizer.stage!r}: `init` has other frozen weights for layer {layer!r} "
                f"than when step {state.step} was trained, or others were frozen then, and its "
                "state goes with those only: give the former `init` and freeze the same, or start "
                "afresh (--fresh)"
            )
    try:
        model.load_state_dict(state.model)
        model.attributes.restore(state.attributes)
        optimizer.restore(state)
    except (ConfigError, ValueError, KeyError) as error:
        reason = f"stage {optimizer.stage!r} cannot take over {', '.join(paths)}: {error}"
        raise CheckpointError(reason) from error
