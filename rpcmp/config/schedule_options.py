"""The keys of a config that may change between two steps while its processes go on.

They cut a mini-batch and order the work on its micro-batches. Models, stages and workers stay as
they are, so that `rpcmp tune` compares options on the same processes, step by step in turn, and so
that a run may try others than those that it has started with.
"""

from __future__ import annotations

from typing import Self, TypeVar

from rpcmp.config.job_sections import JobSettings
from rpcmp.config.types import Positive, Schedule, Strict

Settings = TypeVar("Settings", bound=JobSettings)


class ScheduleOptions(Strict):
    """A value for each of these keys.

    Attributes:
        max_in_flight: None: as many as the schedule needs.
    """

    num_microbatches: Positive
    schedule: Schedule = "1f1b"
    max_in_flight: Positive | None = None
    microbatches_per_message: Positive = 1

    @classmethod
    def of(cls, settings: JobSettings) -> Self:
        """Return the options of a config, and the defaults for those that are "auto"."""
        keys = {key: getattr(settings, key) for key in cls.model_fields}
        return cls(**{key: value for key, value in keys.items() if value != "auto"})

    def on(self, settings: Settings) -> Settings:
        """Return a copy of a job that has these options, and no others to try."""
        return settings.model_copy(update=self.model_dump())

    @property
    def without_count(self) -> str:
        """The options in words, without the number of micro-batches."""
        in_flight = "" if self.max_in_flight is None else f", max_in_flight {self.max_in_flight}"
        count = self.microbatches_per_message
        return f"{self.schedule}{in_flight}{'' if count == 1 else f', {count} a message'}"

    def __str__(self) -> str:
        plural = "" if self.num_microbatches == 1 else "es"
        return f"{self.num_microbatches} micro-batch{plural}, {self.without_count}"
