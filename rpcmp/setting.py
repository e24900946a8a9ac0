"""What of a job may change between two steps while its processes go on.

How a mini-batch is cut, and in which order its micro-batches are worked on. Models, stages and
workers stay as they are, so that `rpcmp tune` compares settings on the same processes, step by step
in turn. Pure: no torch.
"""

from __future__ import annotations

from typing import Self

from rpcmp.config import Config
from rpcmp.kinds import Positive, Schedule, Strict


class Setting(Strict):
    """One choice of them; the keys are those of the config."""

    num_microbatches: Positive
    schedule: Schedule
    max_in_flight: Positive | None = None
    microbatches_per_message: Positive = 1

    @classmethod
    def of(cls, config: Config) -> Self:
        """The config's own."""
        return cls(**{key: getattr(config, key) for key in cls.model_fields})

    def on(self, config: Config) -> Config:
        """`config` with this setting."""
        return config.model_copy(update=self.model_dump())

    @property
    def way(self) -> str:
        """All but the number of micro-batches."""
        in_flight = "" if self.max_in_flight is None else f", max_in_flight {self.max_in_flight}"
        count = self.microbatches_per_message
        return f"{self.schedule}{in_flight}{'' if count == 1 else f', {count} a message'}"

    def __str__(self) -> str:
        plural = "" if self.num_microbatches == 1 else "es"
        return f"{self.num_microbatches} micro-batch{plural}, {self.way}"
