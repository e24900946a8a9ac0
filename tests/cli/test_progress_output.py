"""`rpcmp tune` and `rpcmp bench` stopped midway."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.cli import progress_output
from rpcmp.tools.bench import contestants
from tests.support.processes import JobFolder, RunningHere, poll_for, rpcmp


def wait_for_output(run: RunningHere, pattern: str) -> None:
    """Wait for a match on standard error."""
    poll_for(lambda: re.search(pattern, run.err.getvalue()), f"a line like {pattern!r}")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _progress_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report every round instead of one line every other second."""
    monkeypatch.setattr(progress_output, "PLAIN_SECONDS", 0.0)


def left_in(folder: Path) -> list[str]:
    """Return the folder's entries except the cache that torch creates per user on import."""
    names = [path.name for path in folder.iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_leaves_nothing_behind(
    job: JobFolder, scratch: Path, signum: signal.Signals
) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    few = ("--microbatches", "2", "--schedules", "gpipe", "--steps", "1")

    def stop(sweep: RunningHere) -> None:
        wait_for_output(
            sweep, r"job: starting .*, then measuring \d+ settings .*, about 10 min left"
        )
        wait_for_output(sweep, r"round (?!1 )\d+ of 1000.* left")
        sweep.signal(signum)

    ended = rpcmp("tune", path, "--budget", "600", "--rounds", "1000", "--json", *few, during=stop)
    assert ended.code == 128 + signum
    found = json.loads(ended.out)
    assert found["is_cut_short"]
    assert found["recommended"] == found["own"]
    assert left_in(scratch) == []


@pytest.mark.cluster
def test_a_stopped_benchmark_shows_its_results_so_far(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case `sleep` has no stages to measure, and this peer is one process."""
    monkeypatch.setattr(contestants, "TRIAL_SECONDS", 0.0)
    peer = "one-process-1-thread"
    few = ("--peers", peer, "--pairs", "1000", "--steps", "1", "--budget", "600")
    small = ("--stages", "2", "--microbatches", "2")

    def stop(run: RunningHere) -> None:
        wait_for_output(run, r"sleep: starting rpcmp \(1 of 2\), about 10 min left")
        wait_for_output(run, r"round (?!1 )\d+ of 1000.* left")
        run.signal(signal.SIGTERM)

    ended = rpcmp("bench", "sleep", *few, *small, "--json", during=stop)
    assert ended.code == 128 + signal.SIGTERM
    found = json.loads(ended.out)
    assert 1 <= found["pairs"] < 1000
    assert set(found["spreads"]) == {"rpcmp", peer}
    assert all(seconds > 0 for seconds in (found["step_s"], found["peers"][peer]))
    assert "stopped: these are the results so far" in found["notes"]
    assert left_in(scratch) == []
