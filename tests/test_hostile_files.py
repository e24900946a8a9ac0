"""Files that somebody else wrote: what they say is bounded before it is believed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.trace import chrome, window
from rpcmp.trace.shares import measure
from tests.test_trace_chrome import GOOD_SPAN, HEADER
from tests.traces import drawn

MOST_MIB = 600
"""Of memory that `rpcmp trace` may take; it was 5,900 for 2.9 MB of a file."""

MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print("MiB", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)
"""


def measured(*arguments: str | Path) -> tuple[int, str, int]:
    """Exit code and standard error of a command, and the MiB that it took at most."""
    words = [sys.executable, "-c", MEASURED, sys.executable, "-m", "rpcmp", *map(str, arguments)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return found.returncode, found.stderr, int(found.stdout.rpartition("MiB")[2])


def many_spans() -> Iterator[bytes]:
    """One span more than is read."""
    yield b'{"traceEvents": ['
    text = json.dumps(GOOD_SPAN).encode() + b","
    for _ in range(chrome.MAX_SPANS // 1000):
        yield text * 1000
    yield text[:-1] + b"]}"


BOMBS = {
    "a value": ((b'{"metadata": [', *[b"[]," * 2**20] * 32), "longer than"),
    "a text": ((b'{"traceEvents": ["', *[b" " * 2**20] * 128), "longer than"),
    "depth": ((b'{"traceEvents": [', b"[" * 500_000), "recursion"),
    "spans": (many_spans(), "has more than 1,000,000 spans"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_archive_does_not_fill_the_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    parts, reason = BOMBS[name]
    with gzip.open(path, "wb", 1) as file:
        for part in parts:
            file.write(part)
    code, said, mib = measured("trace", path)
    assert (code, mib < MOST_MIB) == (2, True), (code, mib)
    assert str(path) in said
    assert reason in said


def test_a_file_without_an_end_is_refused_by_what_it_decompresses_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "MAX_TEXT", 100_000)
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(b" " * 200_000))
    with pytest.raises(ConfigError, match=r"run.json.gz is not .* longer than 100,000 characters"):
        chrome.read(path)


def test_pipes_and_devices_are_no_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    for path in (tmp_path / "run.json", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            chrome.read(path)


def test_values_may_lie_across_blocks_and_the_array_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    later = [
        {**GOOD_SPAN, "ts": 10 * n, "args": {**GOOD_SPAN["args"], "step": n}}
        for n in range(1, 2000)
    ]
    document = {"other": 1.5, "metadata": {"rpcmp": HEADER}, "traceEvents": later, "last": [{}]}
    path.write_text(json.dumps(document, indent=3))
    assert [span.step for span in chrome.read(path).tracks[0].spans] == [*range(1, 2000)]


def test_of_a_trace_with_too_many_spans_some_steps_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    cells = "F0 B0 O . " * 9
    chrome.write(drawn(f"a {cells}\nb . {cells}"), path)
    whole = chrome.read(path)
    expected = measure(whole, window.window(whole, 4, 5))
    monkeypatch.setattr(chrome, "MAX_SPANS", 30)
    with pytest.raises(ConfigError, match=r"run.json has more than 30 spans .* --steps 10:12"):
        chrome.read(path)
    part = chrome.read(path, 4, 5)
    assert len(part.tracks[0].spans) == 12
    assert measure(part, window.window(part, 4, 5)) == expected
