"""Mixed precision: it has the bits of one process, whichever steps are skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rpcmp.config import loader
from rpcmp.driver.loss_scaler import LossScaler
from rpcmp.errors import JobError, LossScaleError, NonFiniteLossError
from rpcmp.process.channel import Message
from tests.support.chains import CHAINS, GRAPH
from tests.support.faults import Faults
from tests.support.halfprecision import PIPELINES, SCALED, SPIKED, batch, hopeless, launched, use
from tests.support.localgroup import LocalGroup, local_group, require_same_bits
from tests.support.localpipeline import local_pipeline
from tests.support.processes import JobFolder

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

CAST = {
    name.partition(", 32 in flight")[0]: text.replace("= 32", "= 8").replace("= 33", "= 9")
    for name, text in CHAINS.items()
    if "LSTM" not in name and "the same" not in name
}
"""The chains that torch can compute in float16 on a CPU, with at most 8 in flight."""

MODELS = {**CAST, "a graph": GRAPH}

CELLS = [
    (name, dtype, schedule)
    for number, name in enumerate(MODELS)
    for dtype, schedules in (
        ("bfloat16", ["zero-bubble", ("gpipe", "1f1b")[number % 2]]),
        ("float16", ["zero-bubble", ("1f1b", "gpipe")[number % 2]]),
    )
    for schedule in schedules
]
"""Cases that pair models, dtypes and schedules; zero-bubble, which splits backwards, has all."""


def prove(job: JobFolder, text: str, *overrides: str) -> int:
    """Compare losses and parameters of six steps with one process; return the skipped steps."""
    found = require_same_bits(loader.load_config(job.config(text), ["steps=6", *overrides]))
    assert len(found.losses) == 6
    return found.skipped


def test_all_precision_options_together_give_the_bits_of_one_process(job: JobFolder) -> None:
    assert 1 <= prove(job, EVERYTHING) <= 5


@pytest.mark.parametrize(("name", "dtype", "schedule"), CELLS)
def test_every_model_gives_the_bits_of_one_process(
    job: JobFolder, name: str, dtype: str, schedule: str
) -> None:
    prove(job, MODELS[name], f"schedule={schedule}", *DTYPES[dtype])


# Skipped steps


def scaling(local: LocalGroup) -> list[tuple[Any, ...]]:
    """Return number, scale, skipped flag and number skipped so far of each step."""
    keys = ("step", "loss_scale", "is_skipped", "skipped_steps")
    return [tuple(event[key] for key in keys) for event in local.of("step")]


STEPS = [
    (1, 35000.0, True, 1),
    (2, 17500.0, True, 2),
    (3, 8750.0, False, 2),
    (4, 8750.0, False, 2),
    (5, 17500.0, True, 3),
    (6, 8750.0, False, 3),
]


def test_skipped_steps_are_counted_and_a_run_resumes_after_one_with_another_balance(
    job: JobFolder, tmp_path: Path
) -> None:
    path = Faults(job).config(SCALED)
    with local_group(loader.load_config(path)) as local:
        whole = local.train()
        assert scaling(local) == STEPS
    with local_group(loader.load_config(path, ["steps=2"])) as local:
        local.train()
        saved = local.save(tmp_path / "kept")
    with local_group(loader.load_config(path, ["model.balance=[2, 1]"]), saved) as local:
        resumed = local.train()
        assert scaling(local) == STEPS[2:]
    assert resumed.losses == whole.losses[2:]
    assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


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
    with local_group(loader.load_config(job.config(text))) as local:
        with pytest.raises(LossScaleError, match=r"the loss scale fell to 6\.6e-08 at step 5"):
            local.train()
        assert are_finite(local.of("step")) == [True, False, False, False]


def are_finite(steps: list[Message]) -> list[bool]:
    return [math.isfinite(step["loss"]) for step in steps]


def test_a_step_that_fails_in_one_replica_is_skipped_by_all(job: JobFolder) -> None:
    config = loader.load_config(Faults(job).config(SPIKED, stages=2, sections=PIPELINES))
    with local_group(config) as local:
        local.train()
        assert [skipped for _, _, skipped, _ in scaling(local)] == [False, False, True] * 2
        assert are_finite(local.of("step")) == [True, True, False] * 2
    require_same_bits(config)


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


def test_losses_of_both_infinities_skip_the_step(job: JobFolder) -> None:
    config = loader.load_config(job.config(INFINITE), ["steps=6"])
    with local_group(config) as local:
        local.train(evaluate=True)
        assert are_finite(local.of("step")) == [False, True] * 3
        assert [skipped for _, _, skipped, _ in scaling(local)] == [True, False] * 3
        assert not math.isfinite(local.of("eval")[-1]["loss"])
    require_same_bits(config)
    unscaled = job.config(INFINITE.replace("loss_scaling", "# loss_scaling"))
    with (
        pytest.raises(NonFiniteLossError, match="the loss is inf in micro-batch 0 at step 1"),
        local_group(loader.load_config(unscaled)) as local,
    ):
        local.train()


# Programs


def test_a_pipeline_with_never_finite_gradients_raises() -> None:
    never = batch(1e30)
    with local_pipeline(hopeless()) as pipeline:
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
    with local_pipeline(hopeless()) as pipeline:
        for _ in range(3):
            pipeline.forward_backward(*never)
            assert not pipeline.optimizer.step()
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.forward_backward(*batch())


def test_stages_are_free_again_after_any_failure_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_inverse(scaler: LossScaler) -> NoReturn:
        raise ValueError("no inverse")

    monkeypatch.setattr(LossScaler, "inverse", property(no_inverse))
    config = hopeless(model={"layers": "zoo:half_evaluating", "balance": [1, 1]})
    with local_pipeline(config) as pipeline:
        for _ in range(2):
            with pytest.raises(JobError, match="at the end of step 1: ValueError: no inverse"):
                pipeline.train_step(*batch())
            assert math.isfinite(pipeline.evaluate(*batch()).loss)


def test_library_calls_skip_and_scale() -> None:
    with local_pipeline(launched()) as pipeline:
        found, _ = use(pipeline, lambda: None)
        state = pipeline.optimizer.state_dict()
        pipeline.optimizer.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 8}})
        assert pipeline.optimizer.loss_scale == 8.0
        pipeline.forward_backward(*batch())
        pipeline.optimizer.clip_grad_norm_(1.0)
        with pytest.raises(JobError, match="gradients that have been clipped are unscaled"):
            pipeline.forward_backward(*batch())
        assert pipeline.optimizer.clip_grad_norm_(1.0) == 0.0
    assert found[1:3] == [False, 1]
    assert found[4] == pytest.approx(0.5, rel=1e-3)
    assert found[5:9] == [True, False, 2, 256.0]
    assert found[-1] == {"scale": 256.0, "growth_tracker": 1, "skipped": 2}


def test_outputs_have_the_dtype_of_the_stages_autocast() -> None:
    stages = [{}, {"autocast": "bfloat16"}]
    with local_pipeline(launched(stages=stages)) as pipeline:
        assert pipeline.predict(batch()[0]).dtype is torch.bfloat16
        assert math.isfinite(pipeline.evaluate(*batch()).loss)
        assert all(value.dtype is not torch.bfloat16 for value in pipeline.state_dict().values())
