"""The settings as they are measured: on one group, which changes from one to the other.

A group for each setting would take seconds to start, memory for all of them at once, and more than
one job at a time from every stage server. So the same processes take a new setting between two
steps. Training just goes on meanwhile; nobody looks at the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.job.segments import Segments
from rpcmp.setting import Setting

SETTLE_STEPS = 1
"""After a change, before the clock counts: other sizes of memory, threads that are new."""


class Measured(NamedTuple):
    """Seconds of a step.

    Attributes:
        step: from begin to end.
        busiest_stage: in which the busiest stage computes: what the step takes without a bubble.
    """

    step: float
    busiest_stage: float


class Runner(Protocol):
    """Trains under any of the settings."""

    async def run(self, setting: Setting, steps: int) -> Measured:
        """Train `steps` steps under `setting`; returns their mean."""


class GroupRunner:
    """Trains them by the way of `rpcmp drive`.

    Args:
        config: the job.
        settings: all that are to be measured.
        connect: addresses of running stage servers; see rpcmp.job.fleet.Fleet.
    """

    def __init__(
        self, config: Config, settings: Sequence[Setting], connect: Sequence[str] | None = None
    ) -> None:
        self._segments = Segments(plain(config), connect, settings)

    async def start(self) -> None:
        """Bring the group to life; see Segments."""
        await self._segments.start()

    async def run(self, setting: Setting, steps: int) -> Measured:
        """See Runner."""
        self._segments.change_to(setting)
        await self._segments.run(SETTLE_STEPS)
        done = await self._segments.run(steps)
        return Measured(done.seconds, max(done.busy_seconds.values()))

    async def close(self) -> None:
        """End whatever runs and free every server."""
        await self._segments.close()


def plain(config: Config) -> Config:
    """The job with train steps only, on mini-batches of one size.

    Clipping stays, since the stages wait for it; a learning-rate scheduler goes, since it may end
    after the steps that it was made for.

    Raises:
        ConfigError: there is no `[data]`, or the replicas' shares are not known.
    """
    section = config.require_data("tuning")
    if config.balance_replicas and any(
        stage.num_replicas > 1 and stage.shares is None for stage in config.stages
    ):
        raise ConfigError(
            "balance_replicas = true: give the `shares` that `rpcmp drive` shows, so that all "
            "settings are measured with the same"
        )
    data = section.model_copy(update={"test": None, "drop_last": True})
    return config.without_schedulers().without_evaluation().model_copy(update={"data": data})
