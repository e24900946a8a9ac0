"""Checkpoints of real runs: resumed with the same bits, and exported.

How they are kept, found, damaged and removed is in tests/controlplane/test_checkpoints.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rpcmp as library
from rpcmp.checkpoint.folder import remove
from rpcmp.observability.events import StepEvent
from rpcmp.observability.run_report import compare, read
from tests.support.faults import drive
from tests.support.processes import JobFolder, Result, rpcmp, running, unstamped
from tests.support.resuming import BODY, STEPS, after, checkpoints, whole_in

CLUSTER = pytest.mark.cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFolder, Result]:
    """Return an uninterrupted run and its files; do not change them."""
    return whole_in(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def left(whole: tuple[JobFolder, Result], job: JobFolder) -> Path:
    """Return the config of a job that has the checkpoints of the whole run up to step 9."""
    config = job.config(BODY)
    shutil.copytree(whole[0].folder / "saved", job.folder / "saved")
    for step in (12, STEPS):
        remove(checkpoints(job).path_of(step))
    return config


def test_a_run_keeps_its_newest_checkpoints(whole: tuple[JobFolder, Result]) -> None:
    job, result = whole
    assert [manifest.step for manifest in checkpoints(job).valid()] == [STEPS, 12, 9]
    newest = checkpoints(job).valid()[0]
    assert newest.layers == ["block0", "block1", "block2", "head"]
    assert (newest.cursor.epoch, newest.cursor.batch) == (3, 4)
    saved = [event for event in result.events if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [3, 6, 9, 12, STEPS]
    assert all(event["seconds"] > 0 for event in saved)
    assert saved[-1]["bytes"] == sum(stage.size for stage in newest.stages)


def test_resuming_in_the_middle_of_an_epoch_gives_the_same_bits(
    whole: tuple[JobFolder, Result], left: Path
) -> None:
    """Under another balance; tests/controlplane/test_checkpoints.py has others."""
    result = drive(left, "--resume", "--set", "model.balance=[1, 3]")
    assert after(result, 0) == after(whole[1], 9)
    assert result.event("resumed")["step"] == 9
    assert unstamped(result.event("eval")) == unstamped(whole[1].event("eval"))


@pytest.mark.cluster
def test_a_changed_learning_rate_applies_after_resuming(left: Path) -> None:
    """The scheduler has not changed the rate yet.

    tests/unit/worker/test_optimizer.py tests rates that a scheduler has changed.
    """
    result = drive(left, "--resume", "--steps", "10", "--set", "optimizer.kwargs.lr=0.002")
    assert "optimizer.kwargs.lr" in result.event("resumed")["changed"]
    assert result.event("step")["learning_rate"] == 0.002


@pytest.mark.cluster
def test_resuming_right_after_an_epoch_ends_it_first(
    whole: tuple[JobFolder, Result], job: JobFolder
) -> None:
    config = job.config(BODY)
    first = drive(config, "--steps", "10", "--set", "checkpoint.every_steps=10")
    assert first.event("eval")["step"] == 10
    result = drive(config, "--resume")
    assert after(result, 0) == after(whole[1], 10)
    assert [e["step"] for e in result.events if e["event"] == "eval"] == [10, STEPS]


@pytest.mark.cluster
def test_resuming_a_run_that_was_killed(whole: tuple[JobFolder, Result], job: JobFolder) -> None:
    config = job.config(BODY)
    with running("drive", config, "--json") as run:
        run.wait_for_line('"checkpoint", "step": 6')
        os.kill(run.pid, signal.SIGKILL)
        run.process.wait()
    result = drive(config, "--resume")
    begin = result.event("resumed")["step"]
    assert begin >= 6
    assert after(result, 0) == after(whole[1], begin)
    killed, resumed = map(read, sorted((job.folder / "runs").glob("job-*")))
    assert (killed.info.outcome, resumed.info.outcome) == ("running", "done")
    assert (killed.info.continues, resumed.info.continues) == (None, killed.name)
    assert [event.step for event in resumed.all(StepEvent)] == list(range(begin + 1, STEPS + 1))
    (first,) = (whole[0].folder / "runs").glob("job-*")
    for later in (killed, resumed):  # each line is whole
        found = compare([read(first), later])
        assert (found.shared, found.first_difference) == (len(later.all(StepEvent)), None)


def test_an_export_is_the_state_dict_of_the_unsplit_model(whole: tuple[JobFolder, Result]) -> None:
    job, result = whole
    target = job.folder / "model.safetensors"
    exported = rpcmp("export", job.folder / "saved", target)
    assert exported.code == 0, exported.err
    state = load_file(target)
    assert library.parameters_sha256(state) == result.event("summary")["parameters_sha256"]
    assert all(not name.startswith("model.") for name in state)


def test_a_run_can_start_from_given_weights(
    whole: tuple[JobFolder, Result], job: JobFolder
) -> None:
    config = job.config(BODY)
    rpcmp("export", whole[0].folder / "saved", job.folder / "model.safetensors")
    given = ("--set", "init=model.safetensors", "--steps", "2")
    verified = rpcmp("verify", config, *given)
    assert verified.code == 0, verified.err
    result = drive(config, *given)
    assert result.losses[0] < 0.5 * whole[1].losses[0]
    folder = split_in_two(job.folder / "model.safetensors", job.folder / "pretrained")
    again = drive(config, "--set", f"init={folder.name}", "--steps", "2", "--fresh")
    assert again.code == 0, again.err
    assert again.losses == result.losses


def split_in_two(path: Path, folder: Path) -> Path:
    """Write a file's tensors as `save_pretrained` writes large models, and return the folder."""
    folder.mkdir()
    state = load_file(path)
    places: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = dict(list(state.items())[number - 1 :: 2])
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param("unknown", "has tensors of no layer: other.weight", marks=CLUSTER),
        ("missing", "does not fit the model: it lacks head.bias"),
        pytest.param("nothing", "there is no init = ", marks=CLUSTER),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    whole: tuple[JobFolder, Result], job: JobFolder, change: str, message: str
) -> None:
    config, path = job.config(BODY), job.folder / "model.safetensors"
    if change != "nothing":
        rpcmp("export", whole[0].folder / "saved", path)
        state = load_file(path)
        state.pop("head.bias") if change == "missing" else state.update(
            {"other.weight": torch.ones(1)}
        )
        save_file(state, path)
    result = drive(config, "--set", "init=model.safetensors")
    assert result.code in (1, 2)
    assert message in result.err
