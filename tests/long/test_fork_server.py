"""A fork server that is lost with all its forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosts import LOSING, assert_went_on, committed_without_fault, slow_config
from tests.support.processes import JobFolder, RunningHere, rpcmp, runs, with_token


@pytest.mark.usefixtures("own_forks")
def test_a_killed_fork_server_is_restarted(job: JobFolder, tmp_path: Path, token: str) -> None:
    """The driver process and all workers die with it; the servers stay."""

    def lose(run: RunningHere) -> None:
        run.wait_for_line(LOSING)
        [victim] = [process for process in with_token(token) if runs(process, "rpcmp.process")]
        victim.kill()

    fault_free = committed_without_fault(tmp_path / "fault_free")
    assert_went_on(rpcmp("drive", slow_config(job), "--json", during=lose), fault_free)
