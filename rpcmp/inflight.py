"""How many micro-batches are under way: at each stage, by its schedule, and in the whole job.

Pure: no torch, so that supervisors can predict what workers will keep.
"""

from __future__ import annotations

from rpcmp import simulation
from rpcmp.config import Config
from rpcmp.schedule import Limits, policy

AHEAD = 2
"""Micro-batches that are asked for beyond what the stages may hold: their questions then lie at the
first stage before it has room for them, and it waits for nobody."""

STEPS_AHEAD = 2
"""Train steps under way at once: the next one's questions arrive while the stages finish this."""


def limits(config: Config) -> dict[str, Limits]:
    """Micro-batches that each stage may keep, by its name; see `Policy.limits`.

    Raises:
        ConfigError: the schedule cannot run with the config's `max_in_flight`.
    """
    return simulation.limits(
        config.graph(), policy(config.schedule), config.num_microbatches, config.max_in_flight
    )


def in_flight(config: Config) -> int:
    """Micro-batches that are under way at once."""
    most = max(each.open for each in limits(config).values())
    return min(most + AHEAD, STEPS_AHEAD * config.num_microbatches)
