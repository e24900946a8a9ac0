"""Optimizers that are not ours, and groups: workers are lost, runs are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp import configfile
from rpcmp.digest import parameters_sha256
from tests.support.faults import committed, drive
from tests.support.localgroup import unsplit
from tests.support.optimizedjobs import JOB, OPTIMIZERS
from tests.support.processes import JobFolder, rpcmp


def reference(config: Path, steps: int) -> str:
    """The parameters of one process."""
    return parameters_sha256(unsplit(configfile.load(config, [f"steps={steps}"])).state)


@pytest.mark.parametrize("name", ["MyOpt", "groups"])
def test_a_run_that_loses_a_worker_ends_with_the_bits_of_one_process_and_is_resumed(
    job: JobFolder, name: str
) -> None:
    optimizer = OPTIMIZERS[name]
    config = job.config(JOB.replace("MORTAL", "") + optimizer)
    expected = {steps: reference(config, steps) for steps in (6, 8)}
    mortal = f'kwargs = {{ marker = "{job.folder / "died"}" }}'
    job.config(JOB.replace("MORTAL", mortal) + optimizer)
    disturbed = drive(config)
    assert disturbed.event("recovered")
    assert committed(disturbed)[1] == expected[6]
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", "steps=8")
    assert resumed.event("resumed")["step"] == 6
    assert resumed.event("summary")["parameters_sha256"] == expected[8]
