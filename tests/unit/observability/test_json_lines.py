"""Files of JSON lines, however the process that writes them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpcmp.observability import json_lines


def test_json_lines_are_whole_after_a_kill(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from rpcmp.observability import json_lines as jsonlines
writer = jsonlines.Writer(Path(sys.argv[1]))
for step in range(1, 10**9):
    writer.append({"step": step, "text": "x" * 300})
    if step == 1000:
        print("so far", flush=True)
"""
    path = tmp_path / "lines.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    lines = json_lines.read(path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 1000


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    writer = json_lines.Writer(tmp_path / "lines.jsonl")
    writer.append({"loss": float("nan"), "list": [1.0, float("inf")], "table": {"x": 0.1}})
    writer.close()
    (line,) = json_lines.read(tmp_path / "lines.jsonl")
    assert line == {"loss": None, "list": [1.0, None], "table": {"x": 0.1}}


def test_append_raises_when_the_disk_is_full() -> None:
    writer = json_lines.Writer(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        writer.append({"step": 1})
