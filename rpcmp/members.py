"""Who takes part in an RPC group: every replica of every stage, and then the driver.

Ranks follow the config: its stages in order, of each its replicas in order, then the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DRIVER = "driver"
"""The driver's name; no stage can have it."""


@dataclass(frozen=True)
class Member:
    """One worker: a replica of a stage.

    Attributes:
        stage: the stage's name.
        stage_index: its place in the config.
        replica: which of its replicas, from 0.
        num_replicas: how many it has.
    """

    stage: str
    stage_index: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def name(self) -> str:
        """Its name in the group."""
        return member(self.stage, self.replica)

    @property
    def label(self) -> str:
        """Its name wherever people read it: a stage's only replica goes by the stage's name."""
        return self.stage if self.num_replicas == 1 else self.name


def member(stage_name: str, replica: int = 0) -> str:
    """A worker's name in the group."""
    return f"{stage_name}:{replica}"


def members(workers: Iterable[Member]) -> list[str]:
    """All names, by rank."""
    return [*(worker.name for worker in workers), DRIVER]
