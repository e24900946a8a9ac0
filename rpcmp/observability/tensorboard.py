"""A run in TensorBoard: curves, the config, and the graph of stages.

The event file is written on the observer's thread by TensorBoard's own record writer. TensorBoard's
usual event writer has a thread of its own, whose errors could not become warnings here.

Imports TensorBoard, an extra, but not torch.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, graph_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from rpcmp.config.schema import Config
from rpcmp.config.stored import flat, redacted
from rpcmp.errors import ConfigError
from rpcmp.observability import events
from rpcmp.observability.run_folder import make_folder

INTERVALS = {"vitals": 10.0, "timeline": 10.0}
"""Smallest interval in seconds between two events of a kind that are written."""

NO_SCALARS = ("event", "time", "generation", "step", "epoch", "is_skipped", "busy_seconds")


class TensorBoard:
    """An observer that writes one run, into a folder of its own in the config's folder.

    Raises:
        ConfigError: the folder cannot be made.
    """

    name = "TensorBoard's event file"

    def __init__(self, config: Config) -> None:
        folder = config.tensorboard_folder
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = make_folder(folder, config.name, time.time())
        except OSError as error:
            raise ConfigError(
                f"log.tensorboard: cannot write {folder}: {error.strerror}; give another folder"
            ) from error
        self._config = config
        self._file: EventFile | None = None
        self._stages: list[events.StageInfo] = []
        self._step = 0
        self._written: dict[str, float] = {}

    def handle(self, event: events.Event) -> None:
        match event:
            case events.RunEvent():
                self._stages = event.graph["stages"]
            case events.StartEvent():
                self._file = EventFile(self._folder)
                self._write_config(self._file)
                if self._stages:
                    self._file.write(graph_def=_graph(self._stages))
            case events.EndEvent() if self._file is not None:
                status = "STATUS_SUCCESS" if event.outcome == "done" else "STATUS_FAILURE"
                info = {"status": status, "end_time_secs": time.time()}
                self._file.write_hparams(hparams.SESSION_END_INFO_TAG, session_end_info=info)
            case _ if self._file is not None:
                self._write_scalars(self._file, event)

    def close(self) -> None:
        """Close the file; a run that never started leaves neither file nor folder."""
        if self._file is not None:
            self._file.close()
        else:
            self._folder.rmdir()

    def _write_config(self, file: EventFile) -> None:
        config = self._config
        settings = json.dumps(redacted(config.model_dump(mode="json")), indent=2)
        text = {
            "dtype": "DT_STRING",
            "string_val": [f"```json\n{settings}\n```".encode()],
            "tensor_shape": {"dim": [{"size": 1}]},
        }
        file.write_summary("config", create_summary_metadata("config", ""), text)
        # Only keys that the config sets: the defaults are the same in all runs.
        own = redacted(config.model_dump(mode="json", exclude_unset=True, exclude={"log"}))
        values = {key: _hparam(value) for key, value in flat(own) if value is not None}
        watched = [] if config.data is None or config.data.test is None else ["loss"]
        metrics = ["loss", *(f"eval/{name}" for name in (*watched, *config.metrics))]
        experiment = {
            "hparam_infos": [{"name": key} for key in values],
            "metric_infos": [{"name": {"tag": metric}} for metric in metrics],
        }
        file.write_hparams(hparams.EXPERIMENT_TAG, experiment=experiment)
        start = {"start_time_secs": time.time(), "hparams": values}
        file.write_hparams(hparams.SESSION_START_INFO_TAG, session_start_info=start)

    def _write_scalars(self, file: EventFile, event: events.Event) -> None:
        kind, now = event.event, time.time() if event.time is None else event.time
        if 0 <= now - self._written.get(kind, float("-inf")) < INTERVALS.get(kind, 0.0):
            return
        self._written[kind] = now
        self._step = getattr(event, "step", self._step)
        if values := dict(_scalars(event)):
            points = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
            file.write(now, step=self._step, summary={"value": points})


class EventFile:
    """An event file in `folder`; each record has reached the kernel when a method returns."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("ab", buffering=0))
        self.write(file_version="brain.Event:2")

    def write(self, at: float | None = None, **content: Any) -> None:
        """Write an event with these fields; `at` is its time in seconds since 1970."""
        event = event_pb2.Event(wall_time=time.time() if at is None else at, **content)
        self._records.write(event.SerializeToString())

    def write_summary(self, tag: str, metadata: Any, tensor: Any) -> None:
        self.write(summary={"value": [{"tag": tag, "metadata": metadata, "tensor": tensor}]})

    def write_hparams(self, tag: str, **content: Any) -> None:
        metadata = hparams.create_summary_metadata(HParamsPluginData(**content))
        self.write_summary(tag, metadata, hparams.NULL_TENSOR)

    def close(self) -> None:
        self._records.close()


def _hparam(value: Any) -> dict[str, Any]:
    """Return the value of a hyperparameter; other values than numbers and bools become text."""
    if isinstance(value, bool):
        return {"bool_value": value}
    if isinstance(value, int | float):
        return {"number_value": value}
    return {"string_value": str(value)}


def _graph(stages: Sequence[events.StageInfo]) -> bytes:
    """Return the graph of the stages, with a node for each input from the batch."""
    sources = {name.partition(".")[0] for stage in stages for name in stage["inputs"]}
    batch = sorted(sources - {stage["name"] for stage in stages})
    nodes: list[dict[str, Any]] = [{"name": name, "op": "batch"} for name in batch]
    nodes += [
        {
            "name": stage["name"],
            "op": "stage",
            "input": [*dict.fromkeys(name.partition(".")[0] for name in stage["inputs"])],
            "device": stage["device"],
            "attr": {
                "replicas": {"i": stage["replicas"]},
                "reads": {"s": ", ".join(stage["inputs"]).encode()},
            },
        }
        for stage in stages
    ]
    graph: bytes = graph_pb2.GraphDef(node=nodes, versions={"producer": 22}).SerializeToString()
    return graph


def _scalars(event: events.Event) -> Iterator[tuple[str, float]]:
    """Yield the points that an event adds to curves, by tag."""
    match event:
        case events.StepEvent():
            values = {key: value for key, value in event.to_json().items() if key not in NO_SCALARS}
            groups = values.pop("group_learning_rates", {})
            values["learning_rate"] = values.pop("learning_rates") or values["learning_rate"]
            for label, rates in groups.items():
                for number, rate in enumerate(rates[1:], start=1):
                    yield f"learning_rate/{label}/group{number}", rate
            yield from _numbers(values, "")
        case events.EvalEvent():
            yield from _numbers(event.values, "eval/")
        case events.CheckpointEvent():
            yield "checkpoint/seconds", event.seconds
            yield "checkpoint/bytes", event.bytes
        case events.RecoveredEvent():
            yield "recovery/seconds", event.seconds
        case events.VitalsEvent():
            for label, process in event.workers.items():
                yield f"memory/{label}", process["memory"]
        case events.TimelineEvent():
            for stage in event.stages:
                yield from _numbers(stage["lost"], f"lost/{stage['label']}/")


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested tables; tags are paths."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value
