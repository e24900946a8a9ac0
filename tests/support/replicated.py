"""Jobs with replicas of stages, for tests/group and tests/cluster."""

from __future__ import annotations

from pathlib import Path

from tests.support.faults import Committed, Faults, committed, drive
from tests.support.processes import JobFolder

MIXED = """
    num_microbatches = 5
    max_grad_norm = 0.5
    scheduler_interval = "step"
    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
    scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
    [model]
    layers = "zoo:mlp"
    balance = [1, 1, 2]
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 2
    shares = [3, 1]
    [[stages]]
    recompute = true
    replicas = 3
    [[stages]]
"""

PIPELINES = """
    schedule = "zero-bubble"
    num_microbatches = 6
    [model]
    layers = "zoo:mlp"
    balance = [2, 2]
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 2
    [[stages]]
    replicas = 2
"""

ALONE = """
    [model]
    layers = "zoo:mlp"
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 3
"""

REPLICATED = "\n[[stages]]\n[[stages]]\nreplicas = 2\n[[stages]]\n"

MIDDLE = 1
"""The stage with two replicas."""


def replicated(faults: Faults) -> Path:
    """Write the config with two replicas of the middle stage."""
    path = faults.config()
    path.write_text(path.read_text() + REPLICATED)
    return path


def committed_without_fault(folder: Path) -> Committed:
    """Return the job's commits without a fault."""
    return committed(drive(replicated(Faults(JobFolder(folder / "job")))))
