"""Mixed precision with lost workers. tests/group/test_precision.py tests the bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import rpcmp as library
from rpcmp.config import loader
from rpcmp.errors import LossScaleError
from tests.support.faults import Faults, drive
from tests.support.halfprecision import PIPELINES, SCALED, SPIKED, batch, hopeless, launched, use
from tests.support.localgroup import local_group
from tests.support.localpipeline import local_pipeline
from tests.support.processes import JobFolder, Result, forked


def in_this_process(config: Path) -> list[Any]:
    """Return the steps of a job without faults as `steps_of` does, and then its parameters."""
    with local_group(loader.load_config(config)) as local:
        local.train()
        return [*steps_of(local.of("step")), local.group.parameters_sha256()]


def steps_of(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return loss and scale of each step, whether it was skipped, and the number skipped so far."""
    keys = ("step", "loss_scale", "is_skipped", "skipped_steps")
    losses = [math.nan if event["loss"] is None else event["loss"] for event in events]
    return [
        (loss.hex(), *(event[key] for key in keys))
        for loss, event in zip(losses, events, strict=True)
    ]


def committed(result: Result) -> list[tuple[Any, ...]]:
    """Return the results that must not depend on faults."""
    assert result.code == 0, result.err
    steps = steps_of([event for event in result.events if event["event"] == "step"])
    return [*steps, result.event("summary")["parameters_sha256"]]


@pytest.mark.cluster
def test_a_worker_killed_in_a_skipped_step_changes_nothing(job: JobFolder) -> None:
    expected = in_this_process(Faults(job).config(SCALED))
    faults = Faults(job).fail_at(1, 2, "SIGKILL", "backward").fail_at(2, 5, "SIGKILL", "saving")
    result = drive(faults.config(SCALED))
    assert committed(result) == expected
    assert len(faults.triggered) == 2
    assert "warning" not in {event["event"] for event in result.events}
    summary = result.event("summary")
    assert (summary["loss_scale"], summary["skipped_steps"]) == (8750.0, 3)


@pytest.mark.cluster
def test_a_step_skipped_by_one_replica_is_skipped_by_all_whichever_worker_is_lost(
    job: JobFolder,
) -> None:
    expected = in_this_process(Faults(job).config(SPIKED, stages=2, sections=PIPELINES))
    # A fault counts forwards, and a replica computes half of them: this one is in step 3.
    faults = Faults(job).fail_at(0, 2, "SIGKILL", "backward").fail_at(1, 6, "SIGKILL", "saving")
    disturbed = drive(faults.config(SPIKED, stages=2, sections=PIPELINES))
    assert len(faults.triggered) == 2
    first, _ = [event for event in disturbed.events if event["event"] == "fault"]
    assert "in backward of micro-batch" in first["error"]
    assert first["step"] == 2
    assert committed(disturbed) == expected
    assert [loss is None for loss in disturbed.losses] == [False, False, True] * 2


RESIZED = """
steps = 6
seed = 3
loss = "zoo:token_loss"
num_microbatches = 3
max_grad_norm = 0.5
autocast = "float16"
loss_scaling = { initial = 1e6, growth_interval = 2 }
scheduler_interval = "step"
optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 1 } }
checkpoint = { dir = "saved", every_steps = 4 }
[model]
layers = "zoo:transformer"
balance = [1, 3]
[data]
train = "zoo:tokens"
batch_size = 11
[[stages]]
replicas = 3
[[stages]]
"""
"""A job of six steps that skips steps 1 and 4. One replica of a stage and three have the same bits:
they add three gradients in the same order, and no layer has statistics of its replica."""


@pytest.mark.cluster
def test_a_run_is_resumed_after_a_skipped_step_with_another_cut_and_other_numbers_of_replicas(
    job: JobFolder,
) -> None:
    config = job.config(RESIZED)
    expected = in_this_process(config)
    assert [skipped for _, _, _, skipped, _ in expected[:-1]] == [True, False, False] * 2
    first = drive(config, "--set", "steps=4")
    assert committed(first)[:-1] == expected[:4]
    changes = ("model.balance=[3, 1]", "stages.0.replicas=1", "stages.1.replicas=3")
    resumed = drive(config, "--resume", *(part for each in changes for part in ("--set", each)))
    assert committed(resumed) == expected[4:]
    assert resumed.event("resumed")["step"] == 4
    assert {*resumed.event("summary")["hosts"]} == {"stage0", "stage1:0", "stage1:1", "stage1:2"}


# Programs.


def lose(which: str) -> None:
    """Kill one process of the running job."""
    forked(which)[0].kill()


def test_losing_a_worker_does_not_reset_the_loss_scale() -> None:
    with library.launch(hopeless()) as pipeline:
        never = batch(1e30)
        for _ in range(2):
            pipeline.train_step(*never)
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.train_step(*never)
        before = pipeline.optimizer.state_dict()["scaler"]
        lose("rpcmp.worker")
        with pytest.raises(LossScaleError, match="at step 3;"):
            pipeline.train_step(*batch())
        state = pipeline.optimizer.state_dict()
        assert (state["step"], state["scaler"]) == (3, before)


@pytest.mark.cluster
def test_library_calls_skip_and_scale_whichever_process_is_lost() -> None:
    victims = iter(["rpcmp.worker", "rpcmp.driver", "rpcmp.worker"])
    with local_pipeline(launched()) as fault_free:
        expected = use(fault_free, lambda: None)
    with library.launch(launched()) as pipeline:
        assert use(pipeline, lambda: lose(next(victims))) == expected
