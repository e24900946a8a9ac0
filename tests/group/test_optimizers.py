"""Other optimizers and parameter groups: bits of one process, and state that cannot be saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import StageError
from tests.support.localgroup import local_group, require_same_bits
from tests.support.optimizedjobs import JOB, OPTIMIZERS
from tests.support.processes import JobFolder
from tests.zoo import ownoptimizers as optimizers


def config(job: JobFolder, optimizer: str, *overrides: str) -> Config:
    """Return the job without checkpoints."""
    path = job.config(JOB.replace("MORTAL", "") + optimizer)
    return loader.load_config(path, overrides).model_copy(update={"checkpoint": None})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_the_bits_of_one_process_also_after_resuming(
    job: JobFolder, tmp_path: Path, name: str
) -> None:
    whole = require_same_bits(config(job, OPTIMIZERS[name], "steps=8"))
    with local_group(config(job, OPTIMIZERS[name])) as local:
        assert local.train().losses == whole.losses[:6]
        saved = local.save(tmp_path / "kept")
    with local_group(config(job, OPTIMIZERS[name], "steps=8"), saved) as local:
        resumed = local.train()
    assert resumed.losses == whole.losses[6:]
    assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


def test_late_optimizer_state_that_cannot_be_saved_ends_the_run_with_a_remedy(
    job: JobFolder,
) -> None:
    late = config(job, 'callable = "ownoptimizers:LateWindow"', "steps=40")
    with local_group(late) as local, pytest.raises(StageError) as raised:
        local.train()
    message = f"failed in saving at step {optimizers.WARM_UP + 1}: TypeError: deque is neither"
    assert message in str(raised.value)
    assert "recovery.enabled = false, without [checkpoint]" in str(raised.value)
