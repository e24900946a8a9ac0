"""Mixed precision in real runs: the bits of one process, whatever is skipped or lost."""

from __future__ import annotations

import math
import re
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import rpcmp as library
from rpcmp.checkpoint.folder import remove
from rpcmp.config import Config
from rpcmp.errors import JobError, LossScaleError
from tests.support.chains import CHAINS, GRAPH
from tests.support.faults import Faults, committed, drive
from tests.support.places import ZOO
from tests.support.processes import JobFolder, Result, rpcmp, runs, with_token
from tests.support.runs import checkpoints_in
from tests.zoo import zoo

EVERYTHING = """
schedule = "zero-bubble"
loss = "zoo:token_loss"
num_microbatches = 3
microbatches_per_message = 2
max_in_flight = 8
max_grad_norm = 0.5
autocast = "float16"
loss_scaling = { initial = 4e4, growth_interval = 1 }
scheduler_interval = "step"
optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 1 } }
[model]
layers = "zoo:sequence"
balance = [1, 1, 2, 2]
[[stages]]
frozen = true
[[stages]]
autocast = "float32"              # an LSTM in less is not to be had on every processor
recompute = true
[[stages]]
recompute = true
[[stages]]
[data]
train = "zoo:tokens"
batch_size = 11
"""

DTYPES = {
    "bfloat16": ("autocast=bfloat16",),
    "float16": ("autocast=float16", "loss_scaling={ initial = 1e9, growth_interval = 2 }"),
}

CAST = [name for name in CHAINS if "LSTM" not in name and "the same" not in name]
"""The chains that torch computes in float16 on a CPU."""


def verified(job: JobFolder, text: str, *overrides: str) -> str:
    """What `rpcmp verify` says of six steps, none of which may be different."""
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("verify", job.config(text), "--steps", "6", *options)
    assert result.code == 0, result.err
    assert "identical: 6 losses" in result.out
    return result.out


def test_all_at_once_gives_the_bits_of_one_process(job: JobFolder) -> None:
    assert re.match("skipped: [1-5] of 6 steps", verified(job, EVERYTHING))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [*(CHAINS[name] for name in CAST), GRAPH], ids=[*CAST, "a graph"])
def test_every_model_gives_the_bits_of_one_process(
    job: JobFolder, text: str, dtype: str, schedule: str
) -> None:
    verified(job, text, f"schedule={schedule}", *DTYPES[dtype])


# Faults and resumes.

SCALED = """
seed = 3
max_grad_norm = 0.5
autocast = "float16"
loss_scaling = { initial = 35000.0, growth_interval = 2 }
checkpoint = { dir = "saved", every_steps = 2, keep = 9 }
"""


def scaling(result: Result) -> list[tuple[Any, ...]]:
    """The scale of each step, whether it was skipped, and how many were so far."""
    keys = ("step", "loss_scale", "is_skipped", "skipped_steps")
    return [tuple(e[key] for key in keys) for e in result.events if e["event"] == "step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFolder, Result]:
    """The job and its run, without a fault; its files are not to be changed."""
    job = JobFolder(tmp_path_factory.mktemp("undisturbed") / "job")
    return job, drive(Faults(job).config(SCALED))


def test_steps_are_skipped_counted_and_shown(undisturbed: tuple[JobFolder, Result]) -> None:
    result = undisturbed[1]
    assert scaling(result) == [
        (1, 35000.0, True, 1),
        (2, 17500.0, True, 2),
        (3, 8750.0, False, 2),
        (4, 8750.0, False, 2),
        (5, 17500.0, True, 3),
        (6, 8750.0, False, 3),
    ]
    summary = result.event("summary")
    assert (summary["loss_scale"], summary["skipped_steps"]) == (8750.0, 3)


def test_a_worker_killed_in_a_skipped_step_changes_nothing(
    job: JobFolder, undisturbed: tuple[JobFolder, Result]
) -> None:
    faults = Faults(job).fail_at(1, 2, "backward", "SIGKILL").fail_at(2, 5, "saving", "SIGKILL")
    result = drive(faults.config(SCALED))
    assert committed(result) == committed(undisturbed[1])
    assert scaling(result) == scaling(undisturbed[1])
    assert len(faults.struck) == 2
    assert "warning" not in {event["event"] for event in result.events}


def test_a_run_resumed_after_a_skipped_step_changes_nothing(
    job: JobFolder, undisturbed: tuple[JobFolder, Result]
) -> None:
    config = Faults(job).config(SCALED)
    shutil.copytree(undisturbed[0].folder / "saved", job.folder / "saved")
    saved = checkpoints_in(job.folder / "saved")
    for step in (4, 6):
        remove(saved.path_of(step))
    result = drive(config, "--resume", "--set", "model.balance=[2, 1]")
    steps, parameters = committed(undisturbed[1])
    assert committed(result) == (steps[2:], parameters)
    assert scaling(result) == scaling(undisturbed[1])[2:]


def test_a_run_whose_gradients_are_never_finite_ends(job: JobFolder) -> None:
    text = """
        steps = 60
        loss_scaling = { backoff_factor = 0.001 }
        recovery = { enabled = false }
        optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 1e30 } }
        [model]
        layers = "zoo:in_place"
        balance = [2, 2]
    """
    result = rpcmp("drive", job.config(text), "--json")
    assert result.code == 1
    assert [loss is None for loss in result.losses] == [False, True, True, True]
    assert "the loss scale fell to 6.6e-08 at step 5" in result.err


SPIKED = """
autocast = "float16"
loss_scaling = { initial = 64.0, growth_interval = 2 }
"""

PIPELINES = """
[[stages]]
replicas = 2
[[stages]]
replicas = 2
[data]
train = { callable = "zoo:spiked", kwargs = { samples = 24, where = 18 } }
shuffle = false
batch_size = 8
"""
"""Of each third step the micro-batch 1 overflows, which is the second replicas'."""


def test_a_step_that_one_replica_cannot_do_is_skipped_by_all_whoever_is_lost_in_it(
    job: JobFolder,
) -> None:
    faults = Faults(job)
    config = faults.config(SPIKED, stages=2, sections=PIPELINES)
    undisturbed = drive(config)
    assert [skipped for _, _, skipped, _ in scaling(undisturbed)] == [False, False, True] * 2
    assert [loss is None for loss in undisturbed.losses] == [False, False, True] * 2
    verified = rpcmp("verify", config, "--steps", "6")
    assert "identical: 6 losses" in verified.out, verified.err
    assert undisturbed.event("summary")["parameters_sha256"] in verified.out
    # A replica has half of the forwards that faults are timed by: this is in step 3.
    faults.fail_at(0, 2, "backward", "SIGKILL").fail_at(1, 6, "saving", "SIGKILL")
    disturbed = drive(faults.config(SPIKED, stages=2, sections=PIPELINES))
    assert len(faults.struck) == 2
    first, _ = [event for event in disturbed.events if event["event"] == "fault"]
    assert "in backward of micro-batch" in first["error"]
    assert first["step"] == 2
    assert scaling(disturbed) == scaling(undisturbed)
    assert disturbed.losses == undisturbed.losses
    ends = [run.event("summary")["parameters_sha256"] for run in (disturbed, undisturbed)]
    assert ends[0] == ends[1]


INFINITE = """
loss = "zoo:product"
num_microbatches = 6
loss_scaling = { initial = 8.0 }
[model]
layers = "zoo:wide"
balance = [1, 1]
[data]
train = "zoo:infinities"
test = "zoo:infinities"
shuffle = false
batch_size = 6
"""


@pytest.mark.long
def test_losses_that_are_infinite_both_ways_are_a_skipped_step(job: JobFolder) -> None:
    config = job.config(INFINITE)
    result = rpcmp("drive", config, "--json", "--set", "steps=6")
    assert result.code == 0, result.err
    assert [loss is None for loss in result.losses] == [True, False] * 3
    assert [skipped for _, _, skipped, _ in scaling(result)] == [True, False] * 3
    assert result.event("eval")["loss"] is None
    verified = rpcmp("verify", config, "--steps", "6")
    assert "identical: 6 losses" in verified.out, verified.err
    assert result.event("summary")["parameters_sha256"] in verified.out
    unscaled = job.config(INFINITE.replace("loss_scaling", "# loss_scaling"))
    result = rpcmp("drive", unscaled)
    assert result.code == 1
    assert "the loss is inf in micro-batch 0 at step 1" in result.err


# From Python.


def hopeless(**more: Any) -> Config:
    """A model none of whose gradients is ever finite, and a scale that shrinks fast."""
    scaling = {"initial": 1.0, "backoff_factor": 0.01}
    return launched(loss_scaling=scaling, recovery={"watchdog": 10.0}, **more)


def test_a_pipeline_whose_gradients_are_never_finite_says_so() -> None:
    never = batch(1e30)
    with library.launch(hopeless()) as pipeline:
        begun = pipeline.parameters_sha256()
        for _ in range(2):
            pipeline.train_step(*never)
        with pytest.raises(LossScaleError, match=r"fell to 1\.0e-06 at step 3;"):
            pipeline.train_step(*never)
        for call in (pipeline.train_step, pipeline.forward_backward):
            with pytest.raises(LossScaleError, match="at step 3;"):
                call(*batch())
        assert pipeline.optimizer.skipped_steps == 3
        state = pipeline.optimizer.state_dict()
        pipeline.optimizer.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 8.0}})
        assert math.isfinite(pipeline.train_step(*batch()))
        assert pipeline.parameters_sha256() != begun
    with library.launch(hopeless()) as pipeline:
        for _ in range(3):
            pipeline.forward_backward(*never)
            assert not pipeline.optimizer.step()
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.forward_backward(*batch())


@pytest.mark.usefixtures("own_forks")
def test_a_lost_worker_makes_no_scale_useful_again(token: str) -> None:
    with library.launch(hopeless()) as pipeline:
        never = batch(1e30)
        for _ in range(2):
            pipeline.train_step(*never)
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.train_step(*never)
        before = pipeline.optimizer.state_dict()["scaler"]
        next(p for p in with_token(token) if runs(p, "rpcmp.worker")).kill()
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.train_step(*batch())
        state = pipeline.optimizer.state_dict()
        assert (state["step"], state["scaler"]) == (3, before)


def test_stages_are_free_again_whatever_the_driver_fails_in() -> None:
    config = hopeless(model={"layers": "mistaken:layers", "balance": [1, 1]})
    with library.launch(config) as pipeline:
        for _ in range(2):
            with pytest.raises(JobError, match="at the end of step 1: ValueError: no inverse"):
                pipeline.train_step(*batch())
            assert math.isfinite(pipeline.evaluate(*batch()).loss)


def launched(**more: Any) -> Config:
    data = {
        "loss": "torch.nn:MSELoss",
        "num_microbatches": 2,
        "autocast": "float16",
        "loss_scaling": {"initial": 1024.0, "growth_interval": 3},
        "model": {"layers": "zoo:mlp", "balance": [2, 2]},
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}},
        **more,
    }
    return Config.model_validate(data).with_folder(ZOO)


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    inputs, targets = zoo.regression(10).tensors
    return inputs * scale, targets


def use(pipeline: library.Pipeline, lose: Any) -> tuple[list[Any], str]:
    """All kinds of calls, some of which skip; what they return, and the parameters in the end."""
    optimizer = pipeline.optimizer
    found: list[Any] = [pipeline.train_step(*batch())]
    lose()
    found += [math.isfinite(pipeline.train_step(*batch(1e9))), optimizer.skipped_steps]
    pipeline.forward_backward(*batch())
    lose()
    pipeline.forward_backward(*batch())
    found += [optimizer.clip_grad_norm_(0.5), optimizer.clip_grad_norm_(10.0), optimizer.step()]
    pipeline.forward_backward(*batch(1e9))
    found += [optimizer.step(), optimizer.skipped_steps, optimizer.loss_scale]
    lose()
    found += [pipeline.train_step(*batch()), optimizer.state_dict()["scaler"]]
    return found, pipeline.parameters_sha256()


@pytest.mark.usefixtures("own_forks")
def test_calls_skip_and_scale_whatever_is_lost(token: str) -> None:
    victims = iter(["rpcmp.worker", "rpcmp.driver", "rpcmp.worker"])

    def lose() -> None:
        which = next(victims)
        next(p for p in with_token(token) if runs(p, which)).kill()

    with library.launch(launched()) as undisturbed:
        found, parameters = use(undisturbed, lambda: None)
        state = undisturbed.optimizer.state_dict()
        undisturbed.optimizer.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 8}})
        assert undisturbed.optimizer.loss_scale == 8.0
        undisturbed.forward_backward(*batch())
        undisturbed.optimizer.clip_grad_norm_(1.0)
        with pytest.raises(JobError, match="gradients that have been clipped are unscaled"):
            undisturbed.forward_backward(*batch())
        assert undisturbed.optimizer.clip_grad_norm_(1.0) == 0.0
    assert found[1:3] == [False, 1]
    assert found[4] == pytest.approx(0.5, rel=1e-3)
    assert found[5:9] == [True, False, 2, 256.0]
    assert found[-1] == {"scale": 256.0, "growth_tracker": 1, "skipped": 2}
    with library.launch(launched()) as pipeline:
        assert use(pipeline, lose) == (found, parameters)


def test_outputs_have_the_type_that_a_stage_computes_in() -> None:
    stages = [{}, {"autocast": "bfloat16"}]
    with library.launch(launched(stages=stages)) as pipeline:
        assert pipeline.predict(batch()[0]).dtype is torch.bfloat16
        assert math.isfinite(pipeline.evaluate(*batch()).loss)
        assert all(value.dtype is not torch.bfloat16 for value in pipeline.state_dict().values())
