"""Short notation for settings of the schedule."""

from __future__ import annotations

from rpcmp.config.schema import ScheduleOptions


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
