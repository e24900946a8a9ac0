"""Trace files: the Chrome trace event format, for Perfetto and chrome://tracing, and back.

    {"traceEvents": [...], "metadata": {"rpcmp": {"version", "begin_ns", "stages": [...]}}}

A file is written one event after the other, and read so: whoever wrote it, it takes no more memory
than MAX_SPANS spans. Spans are read from the events; transfers, idle time and arrows follow from
them and are not.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError

import rpcmp
from rpcmp.errors import ConfigError
from rpcmp.trace.elements import Elements
from rpcmp.trace.events import Events, category
from rpcmp.trace.spans import Kind, Span, Trace, Track

MAX_SPANS = 1_000_000
"""Of a file that is read: 15,000 steps of 4 stages with 8 micro-batches."""

MAX_TEXT = 2**30
"""Characters of a file that is read, after it was decompressed; a span with all that is drawn with
it takes less than 1,000."""

SHOWN = 300
"""Characters of an event that a message has."""

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
    traceEvents: list[None]  # noqa: N815


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


def read(path: Path, first: int | None = None, last: int | None = None) -> Trace:
    """The trace that `write` wrote.

    Args:
        path: the file.
        first, last: the steps that are looked at, None for the trace's own; of a trace with more
            than MAX_SPANS only these and their neighbours are kept.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        _require_regular(path)
        try:
            return _read(path, _Spans())
        except _TooManyError:
            if first is None and last is None:
                raise
            return _read(path, _Spans(first, last))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except ValidationError as error:
        details = error.errors()[0]
        reason = f"{'.'.join(map(str, details['loc'])) or 'the file'}: {details['msg']}"
    except _TooManyError as error:
        raise ConfigError(f"the trace {path} has {error}") from None
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
        raise ValueError(f"an event without a proper {error}: {str(value)[:SHOWN]}") from error


def _span(event: Mapping[str, Any]) -> _Event:
    start_ns, args = round(event["ts"] * 1000), event["args"]
    ready_ns = start_ns - round(args["waited_us"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    kind, step, microbatch = _KINDS[event["cat"]], int(args["step"]), int(args["microbatch"])
    return _Event(int(event["pid"]), Span(kind, step, microbatch, ready_ns, start_ns, end_ns))


class _TooManyError(Exception):
    """More spans than are read."""


class _Spans:
    """The spans of a file, by process, as they are read.

    Args:
        first, last: steps outside of which spans are left out; None: no limit. Their neighbours
            are kept, because a window ends where the next step begins, and a stage idles from
            the end of the step before.
    """

    def __init__(self, first: int | None = None, last: int | None = None) -> None:
        self.by_pid: dict[int, list[Span]] = defaultdict(list)
        self._first = -math.inf if first is None else first - 1
        self._last = math.inf if last is None else last + 1
        self._left = MAX_SPANS

    def take(self, event: Any) -> None:
        """Keep an event if it is a span of these steps."""
        if not isinstance(event, _Event) or not self._first <= event.span.step <= self._last:
            return
        if not self._left:
            raise _TooManyError(
                f"more than {MAX_SPANS:,} spans of the steps that are looked at; "
                "take fewer, such as --steps 10:12"
            )
        self._left -= 1
        self.by_pid[event.pid].append(event.span)


def _read(path: Path, spans: _Spans) -> Trace:
    with _open(path, "rt") as file:
        found = Elements(file, MAX_TEXT, _only_spans).read("traceEvents", spans.take)
    return _trace(_Document.model_validate(found).metadata.rpcmp, spans)


def _require_regular(path: Path) -> None:
    """Refuse what has no end, such as a device, and what opening it would wait for."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder's own error is better
        raise ValueError("it is no regular file")


def _trace(header: _Header, found: _Spans) -> Trace:
    spans = found.by_pid
    tracks = (
        Track(stage.name, stage.host, _moved(spans.pop(pid, []), header.begin_ns))
        for pid, stage in enumerate(header.stages, start=1)
    )
    trace = Trace(tuple(tracks), {stage.name: stage.producers for stage in header.stages})
    _check(trace, spans)
    return trace


def _moved(spans: list[Span], by_ns: int) -> tuple[Span, ...]:
    for index, (kind, step, microbatch, *times) in enumerate(spans):  # in place: there are many
        ready_ns, start_ns, end_ns = (time + by_ns for time in times)
        spans[index] = Span(kind, step, microbatch, ready_ns, start_ns, end_ns)
    return tuple(spans)


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
