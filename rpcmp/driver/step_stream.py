"""The steps of a run: which mini-batch each trains on, from wherever the run goes on.

Datasets with indices go on anywhere. A stream goes on from the position that was kept with the
step, or is read again up to there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.data.stream_shares import Position
from rpcmp.data.streams import StreamBatches
from rpcmp.driver.datasets import TrainData, total_steps
from rpcmp.driver.remote_stream import RemoteStream
from rpcmp.driver.rounds import Batch
from rpcmp.errors import ConfigError
from rpcmp.observability.events import StepEvent
from rpcmp.process.activity import Activity
from rpcmp.rpc.messages import StepReport


@dataclass(frozen=True)
class Step:
    """An optimizer step of the run; steps and epochs count from 1.

    Attributes:
        data_seconds: seconds that the driver waited for the mini-batch.
    """

    number: int
    epoch: int
    ends_epoch: bool
    batch: Batch
    data_seconds: float

    def event(self, loss: float, seconds: float) -> StepEvent:
        """Return its event, without the values that the stages report."""
        return StepEvent(
            step=self.number,
            epoch=self.epoch,
            loss=loss,
            samples_per_s=self.batch.num_samples / seconds,
            step_s=seconds,
            data_share=self.data_seconds / seconds,
            busy={},
            busy_seconds={},
            learning_rate=None,
            learning_rates={},
        )


class _RunEndedError(Exception):
    """The run ends before a stream was read again."""


class StepStream:
    """The steps of a run.

    Args:
        activity: records when their mini-batches are loaded.
        stop: ends the stream of steps while a stream of samples is read again.
    """

    def __init__(
        self, config: Config, data: TrainData, activity: Activity, stop: threading.Event
    ) -> None:
        self._data = data
        self._samples = data if isinstance(data, StreamBatches | RemoteStream) else None
        self._stop = stop
        self._activity = activity
        self.total = total_steps(config, len(data))

    def seek(self, step: int, text: str, tell: Callable[[str], None]) -> None:
        """Let a stream go on from its position after `step`, of an earlier generation or run.

        Args:
            text: the position.
            tell: called with warnings: that it has to be read again, and for how long; that it is
                not the same any more.

        Raises:
            ConfigError: the run has not trained on this stream up to there.
        """
        data = self._samples
        if data is None or not step:
            return
        start = data.parse(text)
        if start.read != step:
            raise ConfigError(
                f"the run has {step} steps, of which {start.read} are known to be of the stream "
                "data.train: begin anew with --fresh, or give it the dataset that it had"
            )
        if start.is_read_again and step < self.total:
            tell(
                f"data.train has no state_dict: its first {step} mini-batches are read again, "
                f"which takes about {max(1, round(start.seconds))} s"
            )

        def skipped(position: Position) -> None:
            if self._stop.is_set():
                raise _RunEndedError
            self._activity.start("data", position.read)  # so that it does not look stuck
            tell(position.last.note)

        data.seek(text, skipped)

    def position_after(self, step: int) -> Position | None:
        """Return where a stream is after a step; None for other datasets."""
        return None if self._samples is None else self._samples.position_after(step)

    def ends_epoch(self, batch: int) -> bool:
        """Return whether mini-batch `batch` of an epoch, counted from 1, is its last."""
        return batch == len(self._data)

    def after(self, number: int) -> Iterator[Step]:
        """Yield the steps after step `number`, to the end of the run."""
        with contextlib.suppress(_RunEndedError):
            yield from self._after(number)

    def _after(self, number: int) -> Iterator[Step]:
        per_epoch = len(self._data)
        while number < self.total:
            epoch, first = 1 + number // per_epoch, number % per_epoch
            started = self._start_loading(number + 1)
            for batch in self._data.epoch(epoch, first):
                number += 1
                seconds = time.perf_counter() - started
                yield Step(number, epoch, number % per_epoch == 0, batch, seconds)
                if number == self.total:
                    return
                started = self._start_loading(number + 1)

    def _start_loading(self, step: int) -> float:
        self._activity.start("data", step)
        return time.perf_counter()


def with_stage_reports(
    event: StepEvent, workers: Sequence[Member], stages: Mapping[str, StepReport]
) -> StepEvent:
    """Return the event with the reports of all workers but lost ones, by label."""
    reports = {worker.label: stages[worker.label] for worker in workers if worker.label in stages}
    rates = {label: report.learning_rate for label, report in reports.items()}
    groups = {
        label: report.learning_rates
        for label, report in reports.items()
        if len(report.learning_rates) > 1
    }
    busy_seconds = {label: dict(report.busy_seconds) for label, report in reports.items()}
    return replace(
        event,
        group_learning_rates=groups or None,
        busy_seconds=busy_seconds,
        core_seconds={label: dict(report.core_seconds) for label, report in reports.items()},
        busy={label: sum(kinds.values()) / event.step_s for label, kinds in busy_seconds.items()},
        learning_rates=rates,
        learning_rate=next((rate for rate in rates.values() if rate is not None), None),
    )
