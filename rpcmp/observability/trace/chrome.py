"""Trace files in the Chrome trace event format, for Perfetto and chrome://tracing.

    {"traceEvents": [...], "metadata": {"rpcmp": {"version", "begin_ns", "stages": [...]}}}

Files are written and read one event at a time, so that reading takes no more memory than MAX_SPANS
spans, even for a file of another program. Only spans are read back: transfers, idle time and arrows
follow from them.

Each stage is a process. Its first thread shows computation and idle time, the others show transfers
to the stage, each on a free thread since slices of one thread must not overlap. Arrows go from the
span that computed an output or a gradient to the span that used it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from pydantic import BaseModel, ValidationError

import rpcmp
from rpcmp.config.files import open_regular
from rpcmp.errors import ConfigError
from rpcmp.observability.trace.critical_path import Causes, idle
from rpcmp.observability.trace.json_stream import JsonStream
from rpcmp.observability.trace.spans import Kind, Span, Trace, Track

Event = dict[str, Any]

COMPUTE = 0
"""The lane of computation; transfers are in lanes from 1."""

ARROWS = {Kind.FORWARD: "activation", Kind.BACKWARD: "gradient"}


def category(kind: Kind) -> str:
    """Return the `cat` of the events of a kind."""
    return kind.name.lower()


def microseconds(ns: int) -> float:
    """Convert a time so that both rounding and truncating its product with 1000 give `ns`.

    Perfetto multiplies by 1000 and truncates: 1.001 would become 1000 ns, and slices that touch
    would overlap and be dropped.
    """
    value = ns / 1000
    return value if int(value * 1000) == ns else math.nextafter(value, math.inf)


class Events:
    """The events of a trace with at least one span; times count from the first span."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._causes = Causes(trace)
        self._begin_ns = trace.begin_ns
        self._pids = {track.stage: pid for pid, track in enumerate(trace.tracks, start=1)}

    def __iter__(self) -> Iterator[Event]:
        for track in self._trace.tracks:
            yield from self._process(track)
            yield from self._spans(track)
            yield from self._idle(track)
            yield from self._transfers(track)
        ids = count(1)
        for track in self._trace.tracks:
            yield from self._arrows(track, ids)

    def _process(self, track: Track) -> Iterator[Event]:
        pid = self._pids[track.stage]
        yield self._metadata(track.stage, "process_name", name=f"{track.stage} on {track.host}")
        yield self._metadata(track.stage, "process_sort_index", sort_index=pid)
        yield self._metadata(track.stage, "thread_name", name="compute")

    def _spans(self, track: Track) -> Iterator[Event]:
        for span in track.spans:
            waited = microseconds(span.start_ns - span.ready_ns)
            args = {"step": span.step, "microbatch": span.microbatch, "waited_us": waited}
            times = (span.start_ns, span.end_ns)
            yield self._slice(track.stage, COMPUTE, span.label, category(span.kind), times, args)

    def _idle(self, track: Track) -> Iterator[Event]:
        whole = (self._begin_ns, self._trace.end_ns)
        for loss, *times in idle(track, self._causes, *whole):
            yield self._slice(track.stage, COMPUTE, loss.value, "idle", times, {})

    def _transfers(self, track: Track) -> Iterator[Event]:
        """Yield transfers, from the end of the sending span to the arrival of all inputs."""
        transfers = sorted(
            (sender.end_ns, max(sender.end_ns, span.ready_ns), name, span)
            for span in track.spans
            for name, sender, _ in self._causes.senders(track.stage, span)
        )
        lanes = _lanes((start_ns, end_ns) for start_ns, end_ns, _, _ in transfers)
        last_lane = COMPUTE
        for lane, (*times, name, span) in zip(lanes, transfers, strict=True):
            if lane > last_lane:
                last_lane = lane
                yield self._metadata(track.stage, "thread_name", lane, name=f"transfer {lane}")
            args = {"step": span.step, "microbatch": span.microbatch}
            label = f"{span.label} from {name}"
            yield self._slice(track.stage, lane, label, "transfer", times, args)

    def _arrows(self, track: Track, ids: Iterator[int]) -> Iterator[Event]:
        """Yield arrows; both ends are strictly inside slices that are longer than 1 ns."""
        for span in track.spans:
            for name, sender, _ in self._causes.senders(track.stage, span):
                to_ns = min(span.start_ns + 1, span.end_ns)
                from_ns = max(sender.start_ns, min(sender.end_ns - 1, to_ns))
                arrow = {"cat": "arrow", "name": ARROWS[span.kind], "id": next(ids)}
                yield {"ph": "s", **arrow, **self._place(name, from_ns)}
                yield {"ph": "f", "bp": "e", **arrow, **self._place(track.stage, to_ns)}

    def _slice(
        self,
        stage: str,
        lane: int,
        name: str,
        category: str,
        times: Iterable[int],
        args: Event,
    ) -> Event:
        start_ns, end_ns = times
        event = {"ph": "X", "name": name, "cat": category, **self._place(stage, start_ns, lane)}
        return {**event, "dur": microseconds(end_ns - start_ns), "args": args}

    def _metadata(self, stage: str, kind: str, lane: int = COMPUTE, **args: Any) -> Event:
        return {"ph": "M", "name": kind, **self._thread(stage, lane), "args": args}

    def _place(self, stage: str, ns: int, lane: int = COMPUTE) -> Event:
        return {**self._thread(stage, lane), "ts": microseconds(ns - self._begin_ns)}

    def _thread(self, stage: str, lane: int) -> Event:
        # Thread ids are unique in the whole file, since some readers use them without the pid.
        pid = self._pids[stage]
        return {"pid": pid, "tid": pid + lane * len(self._pids)}


def _lanes(intervals: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield a lane, from 1, for each interval, so that intervals of one lane do not overlap.

    Args:
        intervals: (start, end) in order of start.
    """
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    unused = count(1)
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else next(unused)
        heappush(busy, (end, lane))
        yield lane


MAX_SPANS = 1_000_000
"""Spans that are read at most: 15,000 steps of 4 stages with 8 micro-batches."""

MAX_TEXT = 2**30
"""Characters that are read at most, after decompression; a span with its transfers and arrows takes
less than 1,000."""

SHOWN = 300
"""Characters of an event in an error message."""

_KINDS = {category(kind): kind for kind in Kind}


class _TrackHeader(BaseModel):
    """A track without its spans; its process id is its index + 1."""

    name: str
    host: str
    producers: tuple[str, ...]


class _TraceHeader(BaseModel):
    """The parts of a trace that the events lack.

    Attributes:
        version: version of the rpcmp that wrote the file.
        begin_ns: zero of the events' times, on the driver's clock.
        stages: in the graph's order.
    """

    version: str
    begin_ns: int
    stages: tuple[_TrackHeader, ...]


class _Metadata(BaseModel):
    rpcmp: _TraceHeader


class _Document(BaseModel):
    metadata: _Metadata
    traceEvents: list[None]  # noqa: N815


class _SpanEvent(NamedTuple):
    """A span in a file; its times count from `begin_ns`."""

    pid: int
    span: Span


def write(trace: Trace, path: Path) -> None:
    """Write `trace`, compressed if the name ends in ".gz".

    Raises:
        ConfigError: the file cannot be written, or the trace has no span.
    """
    if not any(track.spans for track in trace.tracks):
        raise ConfigError(f"nothing to write to {path}: no step was recorded")
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    metadata = _Metadata(rpcmp=_header(trace)).model_dump()
    try:
        with path.open("wb") as raw, _text(raw, path, "wt") as file:
            file.write('{"traceEvents":[')
            for number, event in enumerate(Events(trace)):
                file.write(f"{',' if number else ''}\n{encode(event)}")
            file.write(f'\n],"metadata":{encode(metadata)}}}\n')
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror or error}") from error


def read(path: Path, first: int | None = None, last: int | None = None) -> Trace:
    """Read a trace that `write` wrote.

    Args:
        path: the file.
        first, last: the steps that are needed; default to the trace's own. Of a trace with more
            than MAX_SPANS only these steps and their neighbours are kept.

    Raises:
        ConfigError: the file cannot be read, or is not a trace.
    """
    try:
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


def _header(trace: Trace) -> _TraceHeader:
    stages = tuple(
        _TrackHeader(
            name=track.stage, host=track.host, producers=trace.producers.get(track.stage, ())
        )
        for track in trace.tracks
    )
    return _TraceHeader(version=rpcmp.__version__, begin_ns=trace.begin_ns, stages=stages)


def _only_spans(event: dict[str, Any]) -> Any:
    """Convert events to spans while the file is parsed: a dict per event takes too much memory."""
    if "ph" not in event:
        return event
    if event["ph"] != "X" or event.get("cat") not in _KINDS:
        return None
    try:
        start_ns, args = round(event["ts"] * 1000), event["args"]
        span = Span(
            kind=_KINDS[event["cat"]],
            step=int(args["step"]),
            microbatch=int(args["microbatch"]),
            ready_ns=start_ns - round(args["waited_us"] * 1000),
            start_ns=start_ns,
            end_ns=start_ns + round(event["dur"] * 1000),
        )
        return _SpanEvent(int(event["pid"]), span)
    except (KeyError, TypeError) as error:
        raise ValueError(f"an event without a proper {error}: {str(event)[:SHOWN]}") from error


class _TooManyError(Exception):
    """The file has more than MAX_SPANS spans."""


class _Spans:
    """The spans of a file by process, as they are read.

    Args:
        first, last: the steps whose spans are kept; None: no limit. Their neighbours are kept too,
            because a window ends with the start of the next step, and a stage idles from the end
            of the step before.
    """

    def __init__(self, first: int | None = None, last: int | None = None) -> None:
        self.by_pid: dict[int, list[Span]] = defaultdict(list)
        self._first = -math.inf if first is None else first - 1
        self._last = math.inf if last is None else last + 1
        self._left = MAX_SPANS

    def take(self, event: Any) -> None:
        """Keep an event if it is a span of these steps."""
        if not isinstance(event, _SpanEvent) or not self._first <= event.span.step <= self._last:
            return
        if not self._left:
            raise _TooManyError(
                f"more than {MAX_SPANS:,} spans of the steps that are looked at; "
                "take fewer, such as --steps 10:12"
            )
        self._left -= 1
        self.by_pid[event.pid].append(event.span)


def _read(path: Path, spans: _Spans) -> Trace:
    with open_regular(path) as raw, _text(raw, path, "rt") as file:
        document = JsonStream(file, MAX_TEXT, _only_spans).read("traceEvents", spans.take)
    header = _Document.model_validate(document).metadata.rpcmp
    tracks = (
        Track(stage.name, stage.host, _moved(spans.by_pid.pop(pid, []), header.begin_ns))
        for pid, stage in enumerate(header.stages, start=1)
    )
    trace = Trace(tuple(tracks), {stage.name: stage.producers for stage in header.stages})
    _check(trace, spans.by_pid)
    return trace


def _text(raw: BinaryIO, path: Path, mode: str) -> IO[str]:
    """Return the text of a file, which is compressed if its name ends in ".gz"."""
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(raw, mode, encoding="utf-8"))
    return TextIOWrapper(raw, encoding="utf-8")


def _moved(spans: list[Span], by_ns: int) -> tuple[Span, ...]:
    for index, (kind, step, microbatch, *times) in enumerate(spans):  # in place: there are many
        ready_ns, start_ns, end_ns = (time + by_ns for time in times)
        spans[index] = Span(kind, step, microbatch, ready_ns, start_ns, end_ns)
    return tuple(spans)


def _check(trace: Trace, without_stage: Mapping[int, list[Span]]) -> None:
    """Refuse spans that overlap or belong to no stage, since shares would be wrong."""
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
