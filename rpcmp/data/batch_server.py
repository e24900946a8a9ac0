"""Inputs and targets on the driver, from which the stages fetch their slices.

A slice goes only to the stage that needs it, which asks for it.
"""

from __future__ import annotations

import threading
from typing import Any

from rpcmp.config.topology import SOURCES
from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree


class BatchServer:
    """Slices of the mini-batches in progress; the RPC service of the driver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: dict[tuple[int, str, int], Any] = {}

    def load(self, round_number: int, inputs: list[Any], targets: list[Any] | None) -> None:
        """Hold a round's slices, one per micro-batch, until `clear`."""
        with self._lock:
            for kind, slices in zip(SOURCES, (inputs, targets or []), strict=True):
                for microbatch, part in enumerate(slices):
                    self._slices[round_number, kind, microbatch] = part

    def clear(self, round_number: int) -> None:
        """Drop a round's slices."""
        with self._lock:
            for key in [key for key in self._slices if key[0] == round_number]:
                del self._slices[key]

    # Called by the stages.

    def slices(
        self, round_number: int, kind: str, path: tuple[str, ...], microbatches: list[int]
    ) -> list[Any]:
        """Return the inputs or targets of some micro-batches, or the part of them at `path`."""
        with self._lock:
            slices = [self._slices.get((round_number, kind, index)) for index in microbatches]
        if any(part is None for part in slices):
            raise ConfigError(f"the batch of round {round_number} has no {kind}s")
        try:
            return [pytree.select(part, path) for part in slices]
        except LookupError as error:
            raise ConfigError(f"a stage reads {'.'.join((kind, *path))!r}: {error}") from error
