"""The driver as its stages see it: the source of inputs and targets.

Stages ask for their slices themselves, so a slice goes straight to the stage that needs it and to
no other.
"""

from __future__ import annotations

import threading
from typing import Any

from rpcmp import tree
from rpcmp.errors import ConfigError
from rpcmp.graph import SOURCES
from rpcmp.work import Outputs, Work


class Source:
    """Serves the slices of the current round's mini-batch; what the driver serves to the group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: dict[tuple[int, str, int], Any] = {}

    def load(self, round_number: int, inputs: list[Any], targets: list[Any] | None) -> None:
        """Hold a round's slices, one a micro-batch, until `clear`."""
        with self._lock:
            for kind, slices in zip(SOURCES, (inputs, targets or []), strict=True):
                for microbatch, part in enumerate(slices):
                    self._slices[round_number, kind, microbatch] = part

    def clear(self) -> None:
        """Let go of all slices."""
        with self._lock:
            self._slices.clear()

    # What the stages call.

    def slice(self, work: Work, kind: str, path: tuple[str, ...]) -> Outputs:
        """One micro-batch's inputs or targets, or the part of them at `path`.

        Raises:
            ConfigError: there is no such part.
        """
        with self._lock:
            found = self._slices.get((work.round, kind, work.microbatch))
        if found is None:
            raise ConfigError(f"micro-batch {work.microbatch} of step {work.step} has no {kind}s")
        try:
            return Outputs(tree.select(found, path), None)
        except LookupError as error:
            raise ConfigError(f"a stage reads {'.'.join((kind, *path))!r}: {error}") from error
