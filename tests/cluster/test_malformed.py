"""Malformed cuts, records and snapshots are errors that their readers name, and crash nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

COUNTS = {"graph": (300, 20_000), "record": (2_000, 40_000), "snapshot": (2_000, 40_000)}


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param(kind, count, marks=mark)
        for kind, counts in COUNTS.items()
        for count, mark in zip(counts, (pytest.mark.cluster, pytest.mark.long), strict=True)
    ],
)
def test_malformed_data_crashes_nothing(kind: str, count: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tool = (sys.executable, "-m", "tests.support.malformed", kind, "1", str(count), str(log))
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{log.read_text()[:2000]}\n{done.stderr[-2000:]}"
    assert json.loads(done.stdout.splitlines()[-1])["read"] == count
