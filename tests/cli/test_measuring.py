"""'rpcmp tune' and 'rpcmp bench' that are stopped in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import JobFolder, Running, poll_for, running


def said(run: Running, pattern: str) -> None:
    """Wait until it has said so on standard error."""
    poll_for(lambda: re.search(pattern, "".join(run.err)), f"a line like {pattern!r}")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of their own; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left_in(folder: Path) -> list[str]:
    """What is there, besides the cache that torch makes for a user when it is imported."""
    names = [path.name for path in folder.iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_of_a_real_job_that_is_stopped_leaves_nothing_behind(
    job: JobFolder, scratch: Path, signum: signal.Signals
) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    with running("tune", path, "--budget", "600", "--rounds", "1000", "--json") as sweep:
        said(sweep, r"job: starting .*, then measuring \d+ settings .*, about 10 min left")
        said(sweep, r"round (?!1 )\d+ of 1000.* left")
        os.kill(sweep.pid, signum)
        ended = sweep.wait()
    assert ended.code == 128 + signum
    found = json.loads(ended.out)
    assert found["is_cut_short"]
    assert found["recommended"] == found["own"]
    assert left_in(scratch) == []


def test_a_benchmark_that_is_stopped_shows_what_there_is(scratch: Path) -> None:
    few = ("--peers", "torch-1f1b", "--pairs", "1000", "--steps", "1", "--budget", "600")
    with running("bench", "overhead", *few, "--json") as run:
        said(run, r"overhead: starting rpcmp \(1 of 2\), about 10 min left")
        said(run, r"round (?!1 )\d+ of 1000.* left")
        os.kill(run.pid, signal.SIGTERM)
        ended = run.wait()
    assert ended.code == 128 + signal.SIGTERM
    found = json.loads(ended.out)
    assert 1 <= found["pairs"] < 1000
    assert set(found["spreads"]) == {"rpcmp", "torch-1f1b"}
    assert all(seconds > 0 for seconds in (found["step_s"], found["peers"]["torch-1f1b"]))
    assert "stopped: this is what there was until then" in found["notes"]
    assert left_in(scratch) == []
