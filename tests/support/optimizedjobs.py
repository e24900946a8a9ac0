"""A job without an optimizer; tests/group and tests/cluster add one."""

from __future__ import annotations

from pathlib import Path

from rpcmp.config import loader
from rpcmp.rpc.tensors import parameters_sha256
from tests.support.faults import committed, drive
from tests.support.localgroup import unsplit
from tests.support.processes import JobFolder, rpcmp

JOB = """
    steps = 6
    loss = "zoo:token_loss"
    num_microbatches = 3
    max_grad_norm = 0.5
    tied = [["embed.weight", "head.weight"]]
    [model]
    layers = "zoo:language"
    balance = [1, 2, 1]
    MORTAL
    [data]
    train = "zoo:tokens"
    batch_size = 12
    [checkpoint]
    dir = "saved"
    every_steps = 2
    [optimizer]
"""

GROUPS = """
    callable = "torch.optim:AdamW"
    kwargs = { lr = 0.01 }
    groups = [
        { match = ["*.bias"], weight_decay = 0.0 },
        { match = ["embed.*", "mix.weight"], lr = 0.03 },
    ]
    [scheduler]
    callable = "torch.optim.lr_scheduler:StepLR"
    kwargs = { step_size = 2 }
"""

OPTIMIZERS = {
    "MyOpt": 'callable = "ownoptimizers:MyOpt"',
    "Noisy": 'callable = "ownoptimizers:Noisy"',
    "SOAP": 'callable = "pytorch_optimizer:SOAP"',
    "groups": GROUPS,
}


def reference(config: Path, steps: int) -> str:
    """Return the hash of the parameters after a run in one process."""
    return parameters_sha256(unsplit(loader.load_config(config, [f"steps={steps}"])).state)


def require_recovery_and_resume(job: JobFolder, name: str) -> None:
    """Lose a worker, then resume, and check that both have the bits of one process."""
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
