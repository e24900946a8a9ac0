"""What other options may take of the memory of workers that is free, and of a stage's limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

import pytest

from rpcmp.config.schema import Config
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.trial_memory import TrialMemory
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.setting_grid import MEMORY_SHARE
from tests.support.settings import chain

MIB = 1 << 20


@dataclass
class Workers:
    """A group whose workers, all on one device, have taken 1 MiB for each micro-batch they hold.

    Attributes:
        idle: bytes of each before its first step.
        free: bytes free on the device.
    """

    job: Config
    free: int | None
    idle: int = MIB
    held: dict[str, int] = field(default_factory=dict)

    @property
    def workers(self) -> Self:
        return self

    def everywhere(self, method: Callable[..., object]) -> dict[str, Any]:
        held = self.held or cost_model.held(self.job)
        if method.__name__ == "free_memory":
            return dict.fromkeys(held, ("here", self.free))
        return {
            stage: {"idle": self.idle, "peak": self.idle + count * MIB}
            for stage, count in held.items()
        }

    def memory(self) -> TrialMemory:
        memory = TrialMemory(cast(StageGroup, self), self.job, self.job)
        memory.measure()
        return memory


SMALL = chain(num_microbatches=16, max_in_flight=2)
LARGE = SMALL.model_copy(update={"max_in_flight": 8})


def more(job: Config) -> int:
    """Return the bytes that all stages take besides those of SMALL."""
    return MIB * (sum(cost_model.held(job).values()) - sum(cost_model.held(SMALL).values()))


def test_a_part_of_the_free_memory_may_be_taken() -> None:
    needed = int(more(LARGE) / MEMORY_SHARE)
    assert needed
    assert Workers(SMALL, needed).memory().fits(LARGE)
    assert not Workers(SMALL, needed - MIB).memory().fits(LARGE)


@pytest.mark.parametrize("free", [0, None])
def test_what_takes_no_more_fits_always(free: int | None) -> None:
    memory = Workers(LARGE, free).memory()
    assert memory.fits(SMALL)
    assert memory.fits(LARGE)
    assert not Workers(SMALL, free).memory().fits(LARGE)


def test_the_limit_of_a_stage_counts() -> None:
    job = chain(
        num_microbatches=16, max_in_flight=2, stages=[{"memory": "100 MiB"}, {"memory": "100 MiB"}]
    )
    larger = job.model_copy(update={"max_in_flight": 8})
    most = max(cost_model.held(larger).values())
    assert Workers(job, 1 << 40, idle=(100 - most) * MIB).memory().fits(larger)
    assert not Workers(job, 1 << 40, idle=(101 - most) * MIB).memory().fits(larger)


def test_what_one_trial_has_taken_counts_for_the_next() -> None:
    """After it less is free, and what is free then is no measure for what others may take."""
    free = int(more(LARGE) / MEMORY_SHARE)
    workers = Workers(SMALL, free)
    memory = workers.memory()
    larger = SMALL.model_copy(update={"max_in_flight": 12})
    assert not memory.fits(larger)
    memory.use(LARGE)
    workers.held, workers.free = cost_model.held(LARGE), free - more(LARGE)
    memory.measure()
    assert not memory.fits(LARGE)
    workers.free = 100 * free
    memory.measure()
    assert not memory.fits(larger)


def test_what_a_group_starts_with_counts_as_more_than_the_configs_own() -> None:
    """Its workers have taken memory for LARGE already, and nothing under SMALL."""
    free = int(more(LARGE) / MEMORY_SHARE)
    workers = Workers(LARGE, free)
    memory = TrialMemory(cast(StageGroup, workers), SMALL, LARGE)
    memory.measure()
    assert memory.fits(LARGE)
    workers.free = free - MIB
    memory.measure()
    assert not memory.fits(LARGE)


def test_what_has_been_held_tells_how_much_a_micro_batch_takes() -> None:
    """With LARGE, workers have taken 1 MiB for each of more micro-batches than with SMALL."""
    free = int(more(LARGE) / MEMORY_SHARE)
    workers = Workers(SMALL, free, held=cost_model.held(LARGE))
    memory = workers.memory()
    assert not memory.fits(LARGE)
    memory.use(LARGE)
    assert memory.fits(LARGE)
