"""A run in TensorBoard: curves, the config, and the graph of stages.

The event file is written on the observer's thread by TensorBoard's own record writer. TensorBoard's
usual event writer has a thread of its own, whose errors could not become warnings here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcmp.config.files import flat, redacted
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.observability.events import (
    CheckpointEvent,
    EndEvent,
    EvalEvent,
    Event,
    RecoveredEvent,
    RunEvent,
    StageInfo,
    StartEvent,
    StepEvent,
    TimelineEvent,
    VitalsEvent,
)
from rpcmp.observability.run_folder import writer

if TYPE_CHECKING:
    from rpcmp.observability.tensorboard_file import EventFile

EVERY = {"vitals": 10.0, "timeline": 10.0}
"""Smallest interval in seconds between two events of a kind that are written."""

NO_SCALARS = ("event", "time", "generation", "step", "epoch", "is_skipped", "busy_seconds")


class TensorBoard:
    """An observer that writes one run, into a folder of its own in the config's folder.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder cannot be made.
    """

    name = "TensorBoard's event file"

    def __init__(self, config: Config) -> None:
        try:
            from rpcmp.observability.tensorboard_file import EventFile
        except ImportError as error:
            raise ConfigError(
                "log.tensorboard needs TensorBoard: pip install 'rpcmp[tensorboard]'"
            ) from error
        folder = config.tensorboard_folder
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = writer.folder_name(config.name, time.time())
            self._folder: Path = writer.make_folder(folder, name)
        except OSError as error:
            raise ConfigError(
                f"log.tensorboard: cannot write {folder}: {error.strerror}; give another folder"
            ) from error
        self._config = config
        self._open = EventFile
        self._file: EventFile | None = None
        self._graph: list[StageInfo] = []
        self._step = 0
        self._shown: dict[str, float] = {}

    def tell(self, event: Event) -> None:
        """See Observer."""
        match event:
            case RunEvent():
                self._graph = event.graph["stages"]
            case StartEvent():
                self._begin()
            case EndEvent() if self._file is not None:
                self._file.end(event.outcome == "done")
            case _ if self._file is not None:
                self._show(self._file, event)

    def close(self) -> None:
        """Close the file; a run that never started leaves neither file nor folder."""
        if self._file is not None:
            self._file.close()
        else:
            self._folder.rmdir()

    def _begin(self) -> None:
        config = self._config
        self._file = self._open(self._folder)
        settings = redacted(config.model_dump(mode="json"))
        self._file.text("config", f"```json\n{json.dumps(settings, indent=2)}\n```")
        # Only keys that the config sets: the defaults are the same in all runs.
        own = redacted(config.model_dump(mode="json", exclude_unset=True, exclude={"log"}))
        watched = [] if config.data is None or config.data.test is None else ["loss"]
        metrics = ["loss", *(f"eval/{name}" for name in (*watched, *config.metrics))]
        self._file.hyperparameters(dict(flat(own)), metrics)
        if self._graph:
            self._file.graph(self._graph)

    def _show(self, file: EventFile, event: Event) -> None:
        kind, now = event.event, time.time() if event.time is None else event.time
        if 0 <= now - self._shown.get(kind, float("-inf")) < EVERY.get(kind, 0.0):
            return
        self._shown[kind] = now
        self._step = getattr(event, "step", self._step)
        if values := dict(_scalars(event)):
            file.scalars(values, self._step, now)


def _others(rates: Sequence[float]) -> dict[str, float]:
    """Return the learning rates of the parameter groups after the first."""
    return {f"group{number}": rate for number, rate in enumerate(rates) if number}


def _scalars(event: Event) -> Iterator[tuple[str, float]]:
    """Yield the points that an event adds to curves, by tag."""
    match event:
        case StepEvent():
            values = {key: value for key, value in event.to_json().items() if key not in NO_SCALARS}
            groups = values.pop("group_learning_rates", {})
            values["learning_rate"] = values.pop("learning_rates") or values["learning_rate"]
            yield from _numbers(
                {f"learning_rate/{label}": _others(rates) for label, rates in groups.items()}, ""
            )
            yield from _numbers(values, "")
        case EvalEvent():
            yield from _numbers(event.values, "eval/")
        case CheckpointEvent():
            yield "checkpoint/seconds", event.seconds
            yield "checkpoint/bytes", event.bytes
        case RecoveredEvent():
            yield "recovery/seconds", event.seconds
        case VitalsEvent():
            for label, process in event.workers.items():
                yield f"memory/{label}", process["memory"]
        case TimelineEvent():
            for stage in event.stages:
                yield from _numbers(stage["lost"], f"lost/{stage['label']}/")


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested tables; tags are paths."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value
