"""What a generation begins with: the config, or what its servers hold of a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rpcmp.config import Config
from rpcmp.job.fleet import Fleet
from rpcmp.job.restore import Holdings, InMemory
from rpcmp.v1 import control_pb2 as pb


@dataclass(frozen=True)
class Begin:
    """Where a generation begins.

    Attributes:
        step: optimizer steps done.
        restores: what each worker begins with, by its label; empty: all start from the config.
    """

    step: int = 0
    restores: Mapping[str, pb.Restore] = field(default_factory=dict)


Choose = Callable[[list[str], dict[str, Holdings]], Awaitable[Begin]]
"""Where to begin, given the stages' assignments and what their servers hold."""


async def afresh(assignments: list[str], holdings: dict[str, Holdings]) -> Begin:
    """From the config."""
    return Begin()


def from_memory(found: InMemory, config: Config, fleet: Fleet) -> Begin:
    """Begin with what the servers hold of one step."""
    labels = [worker.label for worker in config.workers]
    addresses = dict(zip(labels, fleet.addresses, strict=True))
    return Begin(
        found.step,
        {
            label: pb.Restore(step=found.step, address="" if holder == label else addresses[holder])
            for label, holder in found.holders.items()
        },
    )
