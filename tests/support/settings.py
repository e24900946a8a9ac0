"""Short notation for settings of the schedule, and a job to change them in."""

from __future__ import annotations

from typing import Any

from rpcmp.config import loader
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config

CHAIN = {
    "model": {"layers": "zoo:mlp", "num_stages": 2},
    "loss": "torch.nn:MSELoss",
    "num_microbatches": 4,
    "data": {"train": "zoo:regression", "batch_size": 16},
}


def chain(**changed: Any) -> Config:
    """Return a chain of two stages with four micro-batches of four samples, under 1f1b."""
    return loader.parse_config({**CHAIN, **changed})


def setting(
    num_microbatches: int, schedule: str, max_in_flight: int | None = None
) -> ScheduleOptions:
    return ScheduleOptions.model_validate(
        {
            "num_microbatches": num_microbatches,
            "schedule": schedule,
            "max_in_flight": max_in_flight,
        }
    )
