"""Exceptions in the user's code at a stage: they name their place, and no stage keeps waiting."""

from __future__ import annotations

import re

import pytest

from rpcmp.config import loader
from rpcmp.errors import JobError, NonFiniteLossError, StageConfigError, StageError
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder

SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])


def failed(job: JobFolder, text: str, *overrides: str) -> JobError:
    """Return the error of a job, after checking that no stage keeps waiting."""
    config = loader.load_config(job.config(text), overrides).without_recovery()
    with local_group(config) as local:
        with pytest.raises(JobError) as raised:
            local.train()
        state = local.group.live_state()
    assert all(state[worker.label]["pending"] == 0 for worker in config.workers)
    return raised.value


def troubled(**arguments: object) -> str:
    kwargs = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
    return f'[model]\nlayers = "zoo:troubled"\nbalance = [2, 2]\nkwargs = {{ {kwargs} }}'


@SCHEDULES
@pytest.mark.parametrize(("position", "stage"), [(2, "stage1"), (0, "stage0")])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_in_the_model_names_stage_step_and_microbatch(
    job: JobFolder, phase: str, position: int, stage: str, schedule: str
) -> None:
    text = troubled(phase=phase, position=position, step=2)
    error = failed(job, text, f"schedule={schedule}")
    assert isinstance(error, StageError)
    message = f"stage '{stage}' failed in {phase} of micro-batch 0 at step 2: ValueError: planted"
    assert str(error).startswith(message)
    assert "planted: größer als erlaubt" in str(error)
    assert "zoo.py" in error.traceback  # in the user's own file
    assert "in trouble" in error.traceback


@SCHEDULES
def test_an_exception_in_an_optimizer_names_stage_and_step(job: JobFolder, schedule: str) -> None:
    text = 'steps = 5\noptimizer = "zoo:TroubledSGD"\n[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]'
    error = failed(job, text, f"schedule={schedule}")
    assert isinstance(error, StageError)
    message = "stage 'stage[01]' failed in optimizer at step 2: ValueError: planted"
    assert re.match(message, str(error))
    assert "zoo.py" in error.traceback


def test_a_shape_mismatch_names_both_stages_and_the_shapes(job: JobFolder) -> None:
    error = failed(job, '[model]\nlayers="zoo:mismatched"\nbalance=[1, 1]')
    assert str(error).startswith("stage 'stage1' failed in forward of micro-batch 0 at step 1")
    assert "it had received from 'stage0': float32[3, 5]" in str(error)
    assert "(3x5 and 20x1)" in str(error)


@SCHEDULES
def test_a_non_finite_loss_stops_the_job(job: JobFolder, schedule: str) -> None:
    text = troubled(phase="forward", step=2, kind="nan")
    error = failed(job, text, f"schedule={schedule}")
    assert isinstance(error, NonFiniteLossError)
    assert "the loss is nan in micro-batch 0 at step 2" in str(error)


def test_sys_exit_in_the_model_is_an_error_like_any_other(job: JobFolder) -> None:
    error = failed(job, troubled(phase="forward", position=2, kind="sys.exit"))
    message = "stage 'stage1' failed in forward of micro-batch 0 at step 1: SystemExit: 3"
    assert str(error).startswith(message)


def test_an_output_that_cannot_be_sent_is_refused(job: JobFolder) -> None:
    error = failed(job, '[model]\nlayers="zoo:opaque"\nbalance=[1, 1]')
    assert str(error).startswith("stage 'stage0' failed in forward")
    assert "a stage returned Holder; return tensors" in str(error)


# Stages that cannot be built


def unbuilt(job: JobFolder, text: str, *overrides: str) -> StageConfigError:
    """Return the error of a stage that cannot be built."""
    config = loader.load_config(job.config(text), overrides)
    with pytest.raises(StageConfigError, match="failed in build") as raised, local_group(config):
        pass
    return raised.value


def test_a_factory_that_raises_names_the_stage(job: JobFolder) -> None:
    error = unbuilt(job, '[model]\nlayers = "zoo:broken_layers"\nbalance = [1, 1]')
    assert error.stage == "stage1"
    assert "this factory is broken" in str(error)
    assert "broken_factory" in error.traceback


def test_a_missing_module_names_the_stage(job: JobFolder) -> None:
    text = '[[stages]]\nmodule = "zoo:Encoder"\n[[stages]]\nmodule = "zoo:NoSuchThing"'
    error = unbuilt(job, text)
    assert error.stage == "stage1"
    assert "has no attribute 'NoSuchThing'" in str(error)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('optimizer={callable="zoo:TroubledSGD",kwargs={lrr=1}}', "'lrr'; did you mean 'lr'?"),
        (
            'loss={callable="zoo:token_loss",kwargs={scael=1}}',
            "unexpected keyword argument 'scael'",
        ),
    ],
)
def test_a_misspelt_factory_argument_is_a_config_error(
    job: JobFolder, key: str, message: str
) -> None:
    assert message in str(unbuilt(job, '[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]', key))
