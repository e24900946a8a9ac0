"""What stages do on the accelerator that torch finds here, CUDA or another: the matrix of devices.

    pytest -m gpu

One device will do: stages share it. A device sums in another order than the CPU and draws other
random numbers. So nothing is dropped out where it is compared with one process on the CPU, and each
operation has a tolerance. Equal bits are proved without hardware: test_pretend_devices.py, in
tests/group and tests/cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rpcmp.config import loader
from rpcmp.pipelining import devices
from rpcmp.tools import verification
from tests.support.faults import STEP, Faults, assert_recovered, drive
from tests.support.pretend import on
from tests.support.processes import JobFolder, Result
from tests.support.resuming import BODY

FOUND = devices.existing()[1:]

pytestmark = pytest.mark.skipif(not FOUND, reason="torch finds no accelerator on this machine")

FLOAT32 = 1e-4
"""Relative, after some steps: sums of float32 in another order."""

NORM = 1e-3
"""The same, divided by the deviation of the two or three samples of a micro-batch."""

TF32 = 1e-2
"""cuDNN rounds the factors of convolutions and recurrent layers to 11 bits if it may."""

HALF = 5e-2
"""Autocast rounds to 8 bits (bfloat16) or 11 (float16)."""

TOLERANCES = {
    "linear": FLOAT32,
    "activation": FLOAT32,
    "batch norm": NORM,
    "layer norm": NORM,
    "embedding": FLOAT32,
    "pooling": FLOAT32,
    "attention": 1e-3,  # one fused kernel, which rescales its sums as it goes
    "convolution": TF32,
    "LSTM": TF32,
}
"""By the kinds of tests/zoo/operations.py, for losses and parameters."""


def chain(kind: str = "linear", head: str = "", devices: str = on("auto", "auto")) -> str:
    """Return a job of two stages, of which the second has the operation."""
    return f"""
        {head}
        [model]
        layers = "operations:layers"
        kwargs = {{ kind = "{kind}" }}
        balance = [1, 2]
        {devices}
    """


def assert_near_the_cpu(config: Path, tolerance: float, *overrides: str) -> None:
    """Check losses and final parameters against one process on the CPU."""
    job = loader.load_config(config, overrides)
    _, pipelined, reference, _ = asyncio.run(verification.run_all(job, None, False))
    assert {facts["device"] for facts in pipelined.hosts.values()} & set(FOUND)
    apart = verification.distance(pipelined, reference)
    assert max(apart.loss, apart.parameters) <= tolerance, apart


@pytest.mark.parametrize(("kind", "tolerance"), TOLERANCES.items(), ids=TOLERANCES)
def test_operation(job: JobFolder, kind: str, tolerance: float) -> None:
    assert_near_the_cpu(job.config(chain(kind)), tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_schedules_clipping_a_scheduler_and_a_stage_on_the_cpu(
    job: JobFolder, schedule: str
) -> None:
    head = """
        max_grad_norm = 0.5
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.05, momentum = 0.9 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 1 } }
    """
    config = job.config(chain(head=head, devices=on("auto", "cpu")))
    assert_near_the_cpu(config, FLOAT32, f"schedule={schedule}")


def test_replicas_and_layers_computed_again(job: JobFolder) -> None:
    tables = f"{on('auto')}\nreplicas = 2\n{on('auto')}\nrecompute = true"
    assert_near_the_cpu(job.config(chain("batch norm", devices=tables)), NORM)


def test_adam(job: JobFolder) -> None:
    head = 'optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.001 } }'
    # A gradient that is nearly zero has a step as large as any other, in its sign's direction.
    assert_near_the_cpu(job.config(chain(head=head)), 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_and_loss_scaling(job: JobFolder, dtype: str) -> None:
    scaling = "loss_scaling = { initial = 1024.0 }" if dtype == "float16" else ""
    config = job.config(chain(head=f'autocast = "{dtype}"\n{scaling}'))
    assert_near_the_cpu(config, HALF)


def losses(result: Result, tolerance: float = FLOAT32) -> object:
    """Return the losses of a run, to be compared with those of another on the same device."""
    assert result.code == 0, result.err
    return pytest.approx(result.losses, rel=tolerance)


def test_dropout_is_the_same_for_every_cut_and_when_computed_again(job: JobFolder) -> None:
    text = f'[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]\n{on("auto", "auto")}'
    config = job.config(text)
    expected = losses(drive(config))
    assert drive(config, "--set", "model.balance=[1, 3]").losses == expected
    again = [f"stages.{index}.recompute=true" for index in range(2)]
    assert drive(config, *(part for each in again for part in ("--set", each))).losses == expected


def test_auto_gives_stages_distinct_devices_as_far_as_there_are(job: JobFolder) -> None:
    result = drive(job.config(f'[model]\nlayers = "zoo:mlp"\n{on("auto", "auto", "cpu")}'))
    assert result.code == 0, result.err
    *found, last = (each["device"] for each in result.event("generation")["workers"].values())
    assert last == "cpu"
    assert {*found} <= {*FOUND}  # which they are depends on other jobs, such as tests beside this
    assert len({*found}) == min(2, len(FOUND))
    warnings = [event["text"] for event in result.events if event["event"] == "warning"]
    assert ("stage0, stage1 share" in str(warnings)) == (len(FOUND) == 1)
    memory = [*result.event("summary")["memory"].values()]
    assert all(0 < each["idle"] <= each["peak"] < 2**28 for each in memory[:2]), memory


def test_layers_measured_and_samples_loaded_there(job: JobFolder) -> None:
    text = f"""
        [model]
        layers = "zoo:mlp"
        balance = "auto"
        {on("auto", "auto")}
        [data]
        train = "zoo:regression"
        batch_size = 10
        at = "stage"
    """
    result = drive(job.config(text))
    assert result.code == 0, result.err
    total = torch.get_device_module(FOUND[0]).mem_get_info(FOUND[0])[1]
    assert all(0 < one["limit_bytes"] <= total for one in result.event("plan")["stages"].values())


def test_a_device_that_runs_out_of_memory_is_explained(job: JobFolder) -> None:
    total = torch.get_device_module(FOUND[0]).mem_get_info(FOUND[0])[1]
    text = f"""
        [model]
        layers = "zoo:hungry"
        kwargs = {{ gigabytes = {total // 2**30 + 1} }}
        balance = [1, 2]
        {on("cpu", FOUND[0])}
    """
    result = drive(job.config(text))
    assert result.code == 1
    assert "OutOfMemoryError" in result.err
    assert f"in use on {FOUND[0]} by this stage" in " ".join(result.err.split())


def test_checkpoints_continue_on_the_cpu_and_back(job: JobFolder, tmp_path: Path) -> None:
    body = BODY.replace("zoo:mlp", "operations:layers").replace(
        "balance = [2, 2]", 'kwargs = { kind = "layer norm" }\nbalance = [2, 1]'
    )
    # In fourteen steps of Adam, of which each goes as far for the smallest gradient.
    expected = losses(drive(JobFolder(tmp_path / "whole").config(body)), 5e-2)
    config = job.config(body + on("auto", "auto"))
    on_cpu = [part for i in range(2) for part in ("--set", f"stages.{i}.device=cpu")]
    found = drive(config, "--steps", "5").losses
    found += drive(config, "--steps", "10", "--resume", *on_cpu).losses
    found += drive(config, "--resume").losses
    assert found == expected


def test_tensors_go_from_device_to_device_or_the_run_says_why_not(job: JobFolder) -> None:
    text = f"""
        steps = 3
        loss_scope = "micro-batch" # the layers count their forwards
        [transfer]
        direct = true
        [model]
        layers = "noted:wide"
        balance = [4, 4]
        {on("auto", "auto")}
        [data]
        batch_size = 16
        train = "noted:samples"
    """
    config = job.config(text)
    direct, plain = drive(config), drive(config, "--set", "transfer.direct=false")
    assert direct.losses == losses(plain)
    for event in direct.events:
        if (
            event["event"] == "log"
        ):  # of a container that keeps processes' memory apart, or a driver
            assert event["text"].startswith("[transfer] direct: ")
            print(event["text"])


def test_a_killed_worker_is_recovered_from(job: JobFolder, tmp_path: Path) -> None:
    sections = on("auto", "auto", "auto")
    whole = drive(Faults(JobFolder(tmp_path / "whole")).config(sections=sections))
    faults = Faults(job).fail_at(1, STEP, "SIGKILL", "backward")
    result = drive(faults.config(sections=sections))
    assert result.losses == losses(whole)
    assert_recovered(faults, result)
