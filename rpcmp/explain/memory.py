"""The memory that a worker will take up, and its supervisor for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rpcmp.balance.cuts import StageHost
from rpcmp.config import Config
from rpcmp.inventory.facts import StageFacts
from rpcmp.snapshot.slots import RETAINED

SNAPSHOTS = RETAINED + 1
"""Copies of a stage that its supervisor holds: those that are whole, and one being written."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker; None where they were not measured.

    Attributes:
        process: of a worker whatever its layers are: torch, Python.
        parameters, buffers, gradients: of its layers.
        optimizer: its state; None where the optimizer tells only by a real step.
        activations: of all micro-batches that it may hold at once, with what it has received.
        snapshots: copies of parameters, buffers and optimizer state that its supervisor holds for
            the case that it is lost; in the host's memory, whatever the stage's device.
        limit: what it may take up; None: nobody knows.
    """

    process: int | None
    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: int | None
    snapshots: int | None
    limit: int | None

    @property
    def total(self) -> int:
        """All that is known of the worker's, without its supervisor's snapshots."""
        measured = (self.process or 0) + (self.activations or 0)
        return measured + self.parameters + self.buffers + self.gradients + (self.optimizer or 0)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing in `total`."""
        return None not in (self.process, self.optimizer, self.activations)

    @property
    def is_too_much(self) -> bool:
        """Whether the worker will not fit."""
        return self.limit is not None and self.total > self.limit


def memory(
    config: Config,
    facts: StageFacts,
    host: StageHost | None,
    part: tuple[int, int],
    limit: int | None,
) -> Memory:
    """That of one stage's worker.

    Args:
        config: the job.
        facts: what the stage is made of.
        host: what was measured there; None: nothing.
        part: the stage's first layer among all that were measured, and the one after its last.
        limit: what it may take up where nothing was measured.
    """
    optimizer = facts.optimizer_bytes
    process = activations = None
    if host is not None:
        process, limit = host.profile.base_bytes, host.limit_bytes
        layers = host.profile.layers[slice(*part)]
        kept = sum(layer.activation_bytes for layer in layers)
        times = 1 if host.recompute else host.held
        activations = host.held * layers[0].input_bytes + times * kept
        if optimizer is None:
            known = facts.parameter_bytes + facts.buffer_bytes + facts.gradient_bytes
            optimizer = max(0, sum(layer.state_bytes for layer in layers) - known)
    snapshots = None
    if config.takes_snapshots and optimizer is not None:
        own = facts.parameter_bytes - facts.foreign_bytes + facts.buffer_bytes
        snapshots = SNAPSHOTS * (own + optimizer)
    return Memory(
        process=process,
        parameters=facts.parameter_bytes,
        buffers=facts.buffer_bytes,
        gradients=facts.gradient_bytes,
        optimizer=optimizer,
        activations=activations,
        snapshots=snapshots,
        limit=limit,
    )
