"""Trace files: the Chrome trace event format, for Perfetto and chrome://tracing, and back.

    {"traceEvents": [...], "metadata": {"rpcmp": {"version", "begin_ns", "stages": [...]}}}

A file is written one event after the other. Spans are read from the events; transfers, idle time
and arrows follow from them and are not.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError

import rpcmp
from rpcmp.errors import ConfigError
from rpcmp.trace.events import Events, category
from rpcmp.trace.spans import Kind, Span, Trace, Track

_KINDS = {category(kind): kind for kind in Kind}


class _Stage(BaseModel):
    """A track but for its spans; its process id is its index + 1."""

    name: str
    host: str
    producers: tuple[str, ...]


class _Header(BaseModel):
    """What the events do not say.

    Attributes:
        version: of the rpcmp that wrote the file.
        begin_ns: the driver's time that the events' times count from.
        stages: in the graph's order.
    """

    version: str
    begin_ns: int
    stages: tuple[_Stage, ...]


class _Metadata(BaseModel):
    rpcmp: _Header


class _Document(BaseModel):
    metadata: _Metadata
    traceEvents: list[Any]  # noqa: N815


class _Event(NamedTuple):
    """A span as it stands in a file: times count from `begin_ns`."""

    pid: int
    span: Span


def write(trace: Trace, path: Path) -> None:
    """Write `trace`, compressed where the name ends in ".gz".

    Raises:
        ConfigError: the file cannot be written, or the trace has no span.
    """
    if not any(track.spans for track in trace.tracks):
        raise ConfigError(f"nothing to write to {path}: no step was recorded")
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    metadata = _Metadata(rpcmp=_header(trace)).model_dump()
    try:
        with _open(path, "wt") as file:
            file.write('{"traceEvents":[')
            for number, event in enumerate(Events(trace)):
                file.write(f"{',' if number else ''}\n{encode(event)}")
            file.write(f'\n],"metadata":{encode(metadata)}}}\n')
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror or error}") from error


def read(path: Path) -> Trace:
    """The trace that `write` wrote.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        with _open(path, "rt") as file:
            document = json.load(file, object_hook=_only_spans)
        return _trace(_Document.model_validate(document))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    except (ValueError, OverflowError, EOFError, zlib.error, RecursionError) as error:
        reason = str(error)
    raise ConfigError(f"{path} is not a trace that `rpcmp drive --trace` wrote: {reason}")


def _open(path: Path, mode: str) -> IO[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    return cast(IO[str], opened(path, mode, encoding="utf-8"))


def _header(trace: Trace) -> _Header:
    stages = tuple(
        _Stage(name=track.stage, host=track.host, producers=trace.producers.get(track.stage, ()))
        for track in trace.tracks
    )
    return _Header(version=rpcmp.__version__, begin_ns=trace.begin_ns, stages=stages)


def _only_spans(value: dict[str, Any]) -> Any:
    """Of events keep the spans, while the file is parsed: a dict for each would fill the memory."""
    if "ph" not in value:
        return value
    if value["ph"] != "X" or value.get("cat") not in _KINDS:
        return None
    try:
        return _span(value)
    except (KeyError, TypeError) as error:
        raise ValueError(f"an event without a proper {error}: {value}") from error


def _span(event: Mapping[str, Any]) -> _Event:
    start_ns, args = round(event["ts"] * 1000), event["args"]
    ready_ns = start_ns - round(args["waited_us"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    kind, step, microbatch = _KINDS[event["cat"]], int(args["step"]), int(args["microbatch"])
    return _Event(int(event["pid"]), Span(kind, step, microbatch, ready_ns, start_ns, end_ns))


def _trace(document: _Document) -> Trace:
    header = document.metadata.rpcmp
    spans: dict[int, list[Span]] = defaultdict(list)
    for event in document.traceEvents:
        if isinstance(event, _Event):
            spans[event.pid].append(_moved(event.span, header.begin_ns))
    tracks = (
        Track(stage.name, stage.host, tuple(spans.pop(pid, ())))
        for pid, stage in enumerate(header.stages, start=1)
    )
    trace = Trace(tuple(tracks), {stage.name: stage.producers for stage in header.stages})
    _check(trace, spans)
    return trace


def _moved(span: Span, by_ns: int) -> Span:
    kind, step, microbatch, ready_ns, start_ns, end_ns = span
    return Span(kind, step, microbatch, ready_ns + by_ns, start_ns + by_ns, end_ns + by_ns)


def _check(trace: Trace, without_stage: Mapping[int, list[Span]]) -> None:
    """Refuse what shares could not be computed of."""
    if without_stage:
        raise ValueError(f"no stages for the processes {sorted(without_stage)}")
    for track in trace.tracks:
        free_ns = -math.inf
        for span in track.spans:
            if not free_ns <= span.start_ns <= span.end_ns or span.ready_ns > span.start_ns:
                raise ValueError(
                    f"{span.label} of step {span.step} at {track.stage!r} overlaps another span or "
                    "ends before it starts"
                )
            free_ns = span.end_ns
