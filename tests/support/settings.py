"""Settings of the schedule, in few words."""

from __future__ import annotations

from rpcmp.setting import Setting


def setting(num_microbatches: int, schedule: str, max_in_flight: int | None = None) -> Setting:
    """For brevity."""
    return Setting.model_validate(
        {
            "num_microbatches": num_microbatches,
            "schedule": schedule,
            "max_in_flight": max_in_flight,
        }
    )
