"""Untrusted text does not control a terminal, in the output of any command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpcmp.observability import run_folder
from tests.support.processes import rpcmp

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\x00\x7f"


SHOWN = r"x\x1b]0;owned\x07\x9b31m\u202eevil\x00\x7f"


def hostile_folder(path: Path) -> Path:
    """A run folder with HOSTILE in its name, error and stages."""
    path.mkdir()
    info = run_folder.RunInfo(name="job", started=0.0, outcome="failed", error=HOSTILE)
    (path / run_folder.RUN).write_text(info.model_dump_json())
    (path / run_folder.CONFIG).write_text("{}")
    event = {"event": "step", "time": 1.0, "step": 1, "loss": 0.5, "busy": {HOSTILE: 0.5}}
    (path / run_folder.METRICS).write_text(f"{json.dumps(event)}\n")
    (path / run_folder.EVENTS).touch()
    return path


def test_a_run_folder_from_elsewhere_does_not_drive_the_terminal(tmp_path: Path) -> None:
    found = rpcmp("report", str(hostile_folder(tmp_path / "run")), "--text")
    assert found.code == 0
    assert found.out.count(SHOWN) == 2
    assert "\x1b" not in found.out


def test_an_error_and_a_misuse_do_not_drive_the_terminal(tmp_path: Path) -> None:
    path = hostile_folder(tmp_path / "run")
    (path / run_folder.RUN).write_text(json.dumps({"name": "job", "started": HOSTILE}))
    for arguments in (["report", str(path / HOSTILE.replace("\x00", ""))], [f"no\x1b]0;{1}\x07"]):
        found = rpcmp(*arguments)
        assert found.code == 2
        assert "\x1b" not in found.err
        assert r"\x1b]0;" in found.err


@pytest.mark.parametrize("end", ["\n", "\r", "\x1b[0m\n"])
def test_only_the_last_line_of_rpcmp_starts_with_try(tmp_path: Path, end: str) -> None:
    found = rpcmp("drive", str(tmp_path / f"no such{end}try: rm -rf all"))
    assert found.code == 2
    assert "\n  try: rm -rf all" in found.err
    tried = [line for line in found.err.splitlines() if line.startswith("try:")]
    assert all("rm -rf" not in line for line in tried)
