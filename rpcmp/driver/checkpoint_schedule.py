"""The schedule of checkpoints.

Whether a step is saved is decided before it starts, since every stage copies its own state right
after the step. Checkpoints are written while later steps are computed. At most two are in progress
at once; the next one that is due waits, so that slow disks slow down training.
"""

from __future__ import annotations

import threading
import time

from rpcmp.config.schema import Config

AT_ONCE = 2
"""Checkpoints in progress at most; more would need more memory for the data to be written."""

DEFAULT_SECONDS = 300.0
"""Seconds between checkpoints if the config sets no interval."""


class CheckpointCadence:
    """The checkpoints of one generation.

    Args:
        config: the job.
        last: the run's last step, which is always saved.
        saved: the step of the checkpoint from which the run resumes; 0: none.
        since: seconds since the run's last checkpoint, or since its start.
    """

    def __init__(self, config: Config, last: int, saved: int = 0, since: float = 0.0) -> None:
        section = config.checkpoint
        self._is_on = section is not None
        self._every_steps = section.every_steps if section else None
        self._every_seconds = section.every_seconds if section else None
        if self._every_steps is None and self._every_seconds is None:
            self._every_seconds = DEFAULT_SECONDS
        self._last = last
        self._changed = threading.Condition()
        self._started_at = time.monotonic() - since
        self._in_progress: set[int] = set()
        self._failed: set[int] = set()
        self._saved = saved

    def is_due(self, step: int) -> bool:
        """Return whether the stages must save `step`, which is about to start; may wait."""
        if not self._is_on or not (self._is_due_by_steps(step) or self._is_due_by_time()):
            return False
        self.start(step)
        return True

    def start(self, step: int) -> None:
        """Add the checkpoint of `step`; waits while too many are in progress."""
        with self._changed:
            while len(self._in_progress) >= AT_ONCE:
                self._changed.wait()
            self._in_progress.add(step)
            self._saved = step
        self._started_at = time.monotonic()

    def includes(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is in progress, or was the last to be started."""
        return step in self._in_progress or self._saved == step

    def finish(self, step: int, failed: bool = False) -> None:
        """Remove the checkpoint of `step`, which is on the disks, or has failed."""
        with self._changed:
            self._in_progress.discard(step)
            if failed:
                self._failed.add(step)
            self._changed.notify_all()

    def has_failed(self, step: int) -> bool:
        return step in self._failed

    def wait(self) -> None:
        """Wait until no checkpoint is in progress."""
        with self._changed:
            while self._in_progress:
                self._changed.wait()

    def _is_due_by_steps(self, step: int) -> bool:
        return step == self._last or (
            self._every_steps is not None and step % self._every_steps == 0
        )

    def _is_due_by_time(self) -> bool:
        return (
            self._every_seconds is not None
            and time.monotonic() - self._started_at >= self._every_seconds
        )
