"""A worker whose links are cut: the run recovers by itself and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

from tests.support.faults import assert_cell, committed_without_fault
from tests.support.processes import JobFolder


def test_the_run_recovers_from_a_worker_cut_off_the_network(
    job: JobFolder, tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    fault_free = committed_without_fault(tmp_path / "fault_free")
    assert_cell(job, fault_free, ("cut", "backward", 0), under=namespace)
