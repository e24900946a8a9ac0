"""A job with checkpoints, and the results that a resumed run must share with it."""

from __future__ import annotations

from pathlib import Path

from rpcmp.checkpoint.folder import CheckpointFolder
from tests.support.faults import Committed, committed, drive
from tests.support.processes import JobFolder, Result
from tests.support.runs import checkpoints_in

STEPS = 14
"""The number of steps; an epoch has five."""

BODY = f"""
steps = {STEPS}
num_microbatches = 2
evaluate_every = 1
max_grad_norm = 1.0
[optimizer]
callable = "torch.optim:AdamW"
kwargs = {{ lr = 0.02 }}
[scheduler]
callable = "torch.optim.lr_scheduler:ReduceLROnPlateau"
kwargs = {{ patience = 0, factor = 0.5 }}
[model]
layers = "zoo:mlp"
balance = [2, 2]
[checkpoint]
dir = "saved"
every_steps = 3
[data]
train = "zoo:regression"
test = "zoo:regression"
batch_size = 10
"""


def whole_in(folder: Path) -> tuple[JobFolder, Result]:
    """Return an uninterrupted run and its files."""
    job = JobFolder(folder / "job")
    return job, drive(job.config(BODY))


def checkpoints(job: JobFolder) -> CheckpointFolder:
    return checkpoints_in(job.folder / "saved")


def after(result: Result, step: int) -> Committed:
    """Return the commits of a run after a step."""
    steps, parameters = committed(result)
    return [found for found in steps if found[0] > step], parameters
