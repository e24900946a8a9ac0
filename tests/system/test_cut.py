"""A worker whose links are cut: the run goes on by itself and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

from tests.support.faults import assert_cell, undisturbed_in
from tests.support.processes import JobFolder


def test_the_run_recovers_from_a_worker_cut_off_the_network(
    job: JobFolder, tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    undisturbed = undisturbed_in(tmp_path / "undisturbed")
    assert_cell(job, undisturbed, ("cut", "backward", 0), under=namespace)
