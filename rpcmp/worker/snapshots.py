"""A stage's snapshots: taken after optimizer steps, for its supervisor and a fresh worker.

    compute thread   step M ──> copy to a slot ──> step M + 1 ...
    supervisor                        └──> a neighbour holds it as well; a disk, where it is due

A step waits for the copy alone. It waits longer only where the neighbour, or the disk, is slower
than a whole step: nothing may be overwritten that others may have to go back to (`snapshot.slots`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.process.activity import Activity
from rpcmp.process.channel import Message
from rpcmp.snapshot.slots import Slots
from rpcmp.snapshot.state import StageState, pack, unpack
from rpcmp.snapshot.writer import SnapshotWriter
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer


class StageSnapshots:
    """Takes and restores the snapshots of one stage.

    Args:
        stage: its name.
        slots: where they lie.
        model, optimizer: what they are of.
        activity: told when one is taken.
        every: optimizer steps from one to the next; 0: only those that are to be saved.
        is_mirrored: whether a neighbour holds them as well, and says so.
        tell: sends a message to the supervisor.
    """

    def __init__(
        self,
        stage: str,
        slots: Slots,
        model: StageModel,
        optimizer: StageOptimizer,
        activity: Activity,
        every: int,
        is_mirrored: bool,
        tell: Callable[[Message], None],
    ) -> None:
        self._stage = stage
        self._slots = slots
        self._writer = SnapshotWriter(slots)
        self._model = model
        self._optimizer = optimizer
        self._activity = activity
        self._every = every
        self._is_mirrored = is_mirrored
        self._tell = tell
        self._changed = threading.Condition()
        self._last = 0
        self._mirrored = 0

    def after_step(self, step: int, save: bool) -> None:
        """Take a snapshot if one is due after `step`; on the compute thread.

        Args:
            save: whether it goes to a disk.

        Raises:
            TypeError: the optimizer or the scheduler keeps something that cannot be stored.
            OSError: there is no memory left.
        """
        if save or (self._every and step % self._every == 0):
            with self._activity.doing("saving", step):
                self._take(step, save)

    def save(self, step: int) -> None:
        """Have what the stage was right after `step`, the last one, written to a disk.

        Where there is no snapshot of that it is what the stage is now.

        Raises:
            TypeError, OSError: see `after_step`.
        """
        found = self._slots.get(step)
        if found is None:
            self.after_step(step, save=True)
        else:
            self._slots.pin(found.slot)
            self._tell({"event": "snapshot", "step": step})

    def note_mirrored(self, step: int) -> None:
        """Hear that a neighbour holds the snapshot of `step`."""
        with self._changed:
            self._mirrored = max(step, self._mirrored)
            self._changed.notify_all()

    def note_saved(self) -> None:
        """Hear that a snapshot is on its disk, and its slot free again."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, step: int, save: bool) -> None:
        slot = self._free_slot()
        tensors, about = pack(self._state(step))
        self._writer.write(slot, step, tensors, about, pin=save)
        self._last = step
        self._tell({"event": "snapshot", "step": step})

    def _free_slot(self) -> int:
        with self._changed:
            while self._is_mirrored and self._mirrored < self._last:
                self._changed.wait()
            while (slot := self._slots.begin()) is None:
                self._changed.wait()
        return slot

    def _state(self, step: int) -> StageState:
        return StageState(
            step,
            self._stage,
            self._model.state_dict(),
            *self._optimizer.parts(),
        )


def restore(paths: Sequence[str], stage: str, model: StageModel, optimizer: StageOptimizer) -> None:
    """Make a fresh stage what it was, before the group begins.

    Args:
        paths: of the files, or the slot, that hold its state.

    Raises:
        CheckpointError: they are those of another model.
    """
    state = unpack(paths, stage, list(model.state_dict()), optimizer.names)
    try:
        model.load_state_dict(state.model)
        optimizer.restore(state)
    except (ConfigError, ValueError, KeyError) as error:
        reason = f"stage {stage!r} cannot take over {', '.join(paths)}: {error}"
        raise CheckpointError(reason) from error
