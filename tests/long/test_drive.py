"""Long runs and loader processes, end to end; see tests/cluster/test_drive.py."""

from __future__ import annotations

import pytest

from tests.support.processes import JobFolder, rpcmp, rpcmp_process

pytestmark = pytest.mark.long


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_jitter_in_every_action_does_not_hang(job: JobFolder, schedule: str) -> None:
    config = job.config("""
        num_microbatches = 8
        optimizer = "zoo:JitterSGD"
        [model]
        layers = "zoo:jittery"
        num_stages = 3
        [data]
        train = { callable = "zoo:regression", kwargs = { samples = 64 } }
        batch_size = 16
    """)
    overrides = ("--set", f"schedule={schedule}", "--steps", "1000")
    result = rpcmp("drive", config, "--json", *overrides)
    assert result.code == 0, result.err
    assert len(result.losses) == 1000


def test_loader_processes_do_not_change_the_order(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 1')
    results = [
        rpcmp_process("drive", config, "--json", "--set", f"data.num_workers={count}")
        for count in (0, 1)
    ]
    assert results[0].losses == results[1].losses
    assert len(results[1].losses) == 2
    assert "leaked" not in results[1].err
