"""The lines of a run's files: they are complete, however the process that writes them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from rpcmp.observability.run_folder import append_line


def test_json_lines_are_whole_after_a_kill(tmp_path: Path) -> None:
    code = """
import os, sys
from io import FileIO
from rpcmp.observability.run_folder import append_line
file = FileIO(sys.argv[1], "a")
for step in range(1, 10**9):
    append_line(file, {"step": step, "text": "x" * 300})
    if step == 1000:
        print("so far", flush=True)
"""
    path = tmp_path / "lines.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    lines = [json.loads(line) for line in whole]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 1000


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(
        FileIO(path, "a"), {"loss": float("nan"), "list": [1.0, float("inf")], "table": {"x": 0.1}}
    )
    assert json.loads(path.read_bytes()) == {"loss": None, "list": [1.0, None], "table": {"x": 0.1}}


def test_append_raises_when_the_disk_is_full() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(FileIO("/dev/full", "a"), {"step": 1})
