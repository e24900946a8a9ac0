"""When the stages save a checkpoint, and that they are not asked for more than their disks can do.

A step that is to be saved is known when it begins, since every stage keeps by itself what it was
right after it. Saving goes on while later steps are computed: up to two at once, and then the next
one that is due waits.
"""

from __future__ import annotations

import threading
import time

from rpcmp.config.schema import Config

AT_ONCE = 2
"""Checkpoints that may be under way; more would need more memory for what waits for the disk."""

DEFAULT_SECONDS = 300.0
"""Between checkpoints where the config does not say it."""


class CheckpointCadence:
    """The checkpoints of one generation.

    Args:
        config: the job.
        last: the run's last step, which is saved in any case.
        saved: the step that has been saved already, if the run goes on from one.
        since: seconds since the run's last checkpoint, or since its beginning.
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
        self._begun = time.monotonic() - since
        self._under_way: set[int] = set()
        self._failed: set[int] = set()
        self._saved = saved

    def is_due(self, step: int) -> bool:
        """Whether the stages have to save `step`, which is about to begin; may wait for disks."""
        if not self._is_on or not (self._is_due_by_steps(step) or self._is_due_by_time()):
            return False
        self.begin(step)
        return True

    def begin(self, step: int) -> None:
        """Note that `step` will be saved; waits while too many are."""
        with self._changed:
            while len(self._under_way) >= AT_ONCE:
                self._changed.wait()
            self._under_way.add(step)
            self._saved = step
        self._begun = time.monotonic()

    def includes(self, step: int) -> bool:
        """Whether `step` is one of the last that are, or will be, saved; a disk is asked once."""
        return step in self._under_way or self._saved == step

    def note_done(self, step: int, failed: bool = False) -> None:
        """Hear that the checkpoint of `step` is on the disks, or that it failed."""
        with self._changed:
            self._under_way.discard(step)
            if failed:
                self._failed.add(step)
            self._changed.notify_all()

    def has_failed(self, step: int) -> bool:
        """Whether the checkpoint of `step` could not be made."""
        return step in self._failed

    def wait(self) -> None:
        """Wait until none is under way."""
        with self._changed:
            while self._under_way:
                self._changed.wait()

    def _is_due_by_steps(self, step: int) -> bool:
        return step == self._last or (
            self._every_steps is not None and step % self._every_steps == 0
        )

    def _is_due_by_time(self) -> bool:
        return (
            self._every_seconds is not None
            and time.monotonic() - self._begun >= self._every_seconds
        )
