"""An event file of TensorBoard. Imports TensorBoard, an extra, but not torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.compat.proto.versions_pb2 import VersionDef
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import (
    STATUS_FAILURE,
    STATUS_SUCCESS,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from rpcmp.observability.events import StageInfo


class EventFile:
    """An event file in `folder`; each record has reached the kernel when a method returns."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("ab", buffering=0))
        self._write(Event(file_version="brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write a point of each curve; `values` are by tag, `at` is in seconds since 1970."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=points)), at)

    def text(self, tag: str, markdown: str) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        self._summary(tag, create_summary_metadata(tag, ""), tensor)

    def hyperparameters(self, values: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Write the hyperparameters of the run.

        Args:
            values: by name; values other than numbers and bools are shown as text.
            metrics: tags of the curves that measure the result.
        """
        start = SessionStartInfo(start_time_secs=time.time())
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            elif value is not None:
                start.hparams[name].string_value = str(value)
        infos = [HParamInfo(name=name) for name in start.hparams]
        shown = [MetricInfo(name=MetricName(tag=tag)) for tag in metrics]
        self._hparams(
            hparams.EXPERIMENT_TAG, experiment=Experiment(hparam_infos=infos, metric_infos=shown)
        )
        self._hparams(hparams.SESSION_START_INFO_TAG, session_start_info=start)

    def graph(self, stages: Sequence[StageInfo]) -> None:
        """Write the graph of the stages, given as in the event `run`."""
        sources = {name.partition(".")[0] for stage in stages for name in stage["inputs"]}
        inner = {stage["name"] for stage in stages}
        nodes = [NodeDef(name=name, op="batch") for name in sorted(sources - inner)]
        for stage in stages:
            read = dict.fromkeys(name.partition(".")[0] for name in stage["inputs"])
            nodes.append(
                NodeDef(
                    name=stage["name"],
                    op="stage",
                    input=list(read),
                    device=stage["device"],
                    attr={
                        "replicas": AttrValue(i=stage["replicas"]),
                        "reads": AttrValue(s=", ".join(stage["inputs"]).encode()),
                    },
                )
            )
        graph = GraphDef(node=nodes, versions=VersionDef(producer=22))
        self._write(Event(graph_def=graph.SerializeToString()))

    def end(self, is_done: bool) -> None:
        """Write the outcome of the run."""
        status = STATUS_SUCCESS if is_done else STATUS_FAILURE
        info = SessionEndInfo(status=status, end_time_secs=time.time())
        self._hparams(hparams.SESSION_END_INFO_TAG, session_end_info=info)

    def close(self) -> None:
        self._records.close()

    def _hparams(self, tag: str, **content: Any) -> None:
        data = HParamsPluginData(**content)
        self._summary(tag, hparams.create_summary_metadata(data), hparams.NULL_TENSOR)

    def _summary(self, tag: str, metadata: SummaryMetadata, tensor: TensorProto) -> None:
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._write(Event(summary=Summary(value=[value])))

    def _write(self, event: Event, at: float | None = None) -> None:
        event.wall_time = time.time() if at is None else at
        self._records.write(event.SerializeToString())
