"""Trace files: the Chrome trace event format, its viewers' requirements, and reading them back."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rpcmp
from rpcmp.errors import ConfigError
from rpcmp.observability.trace import chrome
from rpcmp.observability.trace.chrome import Events, microseconds
from rpcmp.observability.trace.spans import Clock, Kind, Span, Trace, Track
from tests.support.tracefiles import GOOD_SPAN, HEADER
from tests.support.traces import DIAMOND, DIAMOND_PRODUCERS, SLOW_LINKS, drawn
from tests.support.tracestrategies import traces

Event = dict[str, Any]


def ns(microseconds: float) -> int:
    """Convert microseconds to nanoseconds as Perfetto does: it truncates."""
    return int(microseconds * 1000)


def by_thread(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Return the slices of every thread in order: begin, end and category."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = ns(event["ts"])
            place = event["pid"], event["tid"]
            found[place].append((begin, begin + ns(event["dur"]), event["cat"]))
    return {thread: sorted(slices) for thread, slices in found.items()}


def faults(events: list[Event]) -> Iterator[str]:
    """Yield errors that viewers would drop or draw wrongly."""
    if len({tid for _, tid in by_thread(events)}) != len(by_thread(events)):
        yield "a thread id is used by two processes"
    for thread, slices in by_thread(events).items():
        for (_, end, _), following in pairwise(slices):
            if following[0] < end:
                yield f"slices of {thread} overlap at {end}"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    if missing := set(by_thread(events)) - named:
        yield f"threads without name: {missing}"
    yield from _faults_of_arrows(events)


def _faults_of_arrows(events: list[Event]) -> Iterator[str]:
    ends = defaultdict(list)
    slices = by_thread(events)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
            at, thread = ns(event["ts"]), slices[event["pid"], event["tid"]]
            kinds = {cat for begin, end, cat in thread if begin <= at <= end}
            if not kinds & {"forward", "backward"}:
                yield f"an arrow outside of spans: {event}"
    for arrow in ends.values():
        if [event["ph"] for event in arrow] != ["s", "f"] or arrow[1].get("bp") != "e":
            yield f"not one beginning and one end: {arrow}"


@pytest.mark.parametrize(
    "trace", [drawn(SLOW_LINKS), drawn(DIAMOND, DIAMOND_PRODUCERS)], ids=["chain", "diamond"]
)
def test_events_of_a_run_obey_the_format(trace: Trace) -> None:
    events = list(Events(trace))
    assert list(faults(events)) == []
    for event in (e for e in events if e["ph"] in "sf"):  # each is strictly inside of one slice
        thread = by_thread(events)[event["pid"], event["tid"]]
        assert [1 for begin, end, _ in thread if begin < ns(event["ts"]) < end] == [1]
    arrows = [event for event in events if event["ph"] in "sf"]
    assert all(a["ts"] <= b["ts"] for a, b in zip(arrows[::2], arrows[1::2], strict=True))


@settings(deadline=None, derandomize=True)
@given(traces())
def test_events_of_any_trace_obey_the_format(trace: Trace) -> None:
    assert list(faults(list(Events(trace)))) == []


@given(st.integers(0, 10**15))
def test_microseconds_give_the_nanoseconds_if_truncated_or_rounded(exact: int) -> None:
    value = json.loads(json.dumps(microseconds(exact)))
    assert int(value * 1000) == round(value * 1000) == exact


def test_stage_shows_computation_idle_time_and_transfers_to_it() -> None:
    events = list(Events(drawn("a F0 ~ ~ ~ ~ B0\nb . ~ - F0 . .")))
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert names == ["a on host-a", "compute", "b on host-b", "compute", "transfer 1"]
    slices = [(e["pid"], e["tid"], e["name"], e["cat"], e["ts"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (1, 1, "F0", "forward", 0),
        (1, 1, "B0", "backward", 5000),
        (1, 1, "overhead", "idle", 1000),
        (2, 2, "F0", "forward", 3000),
        (2, 2, "bubble", "idle", 0),
        (2, 2, "network", "idle", 1000),
        (2, 2, "overhead", "idle", 2000),
        (2, 2, "bubble", "idle", 4000),
        (2, 4, "F0 from a", "transfer", 1000),
    ]
    forward = next(e for e in events if e["pid"] == 2 and e["name"] == "F0")
    assert forward["dur"] == 1000
    assert forward["args"] == {"step": 1, "microbatch": 0, "waited_us": 1000}
    transfer = next(e for e in events if e.get("cat") == "transfer")
    assert transfer["dur"] == 1000


def test_overlapping_transfers_are_on_separate_threads() -> None:
    trace = drawn("a F0 F1 F2 . . .\nb . . . F0 F1 F2")
    early, late = trace.tracks
    spans = tuple(span._replace(ready_ns=3_000_000) for span in late.spans)
    events = list(Events(Trace((early, Track("b", "host", spans)), trace.producers)))
    transfers = [(e["name"], e["tid"]) for e in events if e.get("cat") == "transfer"]
    assert transfers == [("F0 from a", 4), ("F1 from a", 6), ("F2 from a", 4)]


@settings(deadline=None, derandomize=True)
@given(trace=traces(), name=st.sampled_from(["run.json", "run.json.gz"]))
def test_read_returns_the_tracks_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    chrome.write(trace, path)
    assert chrome.read(path) == trace


def test_clocks_are_aligned_when_a_trace_is_made() -> None:
    spans = (Span(Kind.FORWARD, 1, 0, 5, 10, 20),)
    clock = Clock(offset_ns=100)
    trace = Trace((Track("a", "host", spans, clock),), {"a": ()})
    assert trace.tracks[0].spans == (Span(Kind.FORWARD, 1, 0, 105, 110, 120),)


def test_file_is_an_object_with_the_events_first(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    chrome.write(drawn(SLOW_LINKS), path)
    document = json.loads(path.read_text())
    assert list(document) == ["traceEvents", "metadata"]  # Perfetto stops at unknown keys
    header = document["metadata"]["rpcmp"]
    assert header["version"] == rpcmp.__version__
    assert header["stages"][1] == {
        "name": "stage1",
        "host": "host-stage1",
        "producers": ["stage0"],
    }


def test_file_is_compressed_if_its_name_ends_in_gz(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    chrome.write(drawn(SLOW_LINKS), path)
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_read_accepts_other_events_and_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(document({"ph": "C", "name": "memory"}, None, {"no": "event"}))
    assert chrome.read(path).tracks == (Track("a", "h", ()),)


def document(*events: Any) -> str:
    """Return the text of a file with these events of one stage."""
    return json.dumps({"traceEvents": events, "metadata": {"rpcmp": HEADER}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "the file: Input should be"),
        ('{"traceEvents": []}', "metadata: Field required"),
        ('{"traceEvents": [], "metadata": {}}', "metadata.rpcmp: Field required"),
        (document(GOOD_SPAN)[:-9], "Expecting"),
        (document({**GOOD_SPAN, "pid": 2}), "no stages for the processes"),
        (document(GOOD_SPAN, GOOD_SPAN), "F0 of step 1 at 'a' overlaps"),
        (document({**GOOD_SPAN, "dur": -1}), "ends before it starts"),
        (document({"ph": "X", "cat": "forward", "ts": 1}), "an event without a proper 'args'"),
        (document({**GOOD_SPAN, "ts": "soon"}), "an event without a proper"),
        (document({**GOOD_SPAN, "ts": float("inf")}), "infinity"),
    ],
)
def test_read_refuses_a_file_that_is_not_a_trace(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run.json is not a trace .*: .*{reason}"):
        chrome.read(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no gzip", "Not a gzipped file"), (gzip.compress(b"[]" * 99, mtime=0)[:20], "ended before")],
)
def test_read_refuses_a_broken_archive(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run.json.gz.*{reason}"):
        chrome.read(path)


def test_read_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*: No such file"):
        chrome.read(tmp_path / "run.json")
    with pytest.raises(ConfigError, match=r"cannot write the trace .*: Is a directory"):
        chrome.write(drawn(SLOW_LINKS), tmp_path)
    with pytest.raises(ConfigError, match=r"run.json: no step was recorded"):
        chrome.write(Trace((), {}), tmp_path / "run.json")
