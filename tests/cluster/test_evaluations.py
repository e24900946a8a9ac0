"""Real runs that depend on evaluations: early stopping, and the best checkpoint."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.evaluatedjobs import BEST, FAST, LAST, config, decided
from tests.support.faults import Faults, committed, drive
from tests.support.processes import JobFolder, Result, rpcmp, running
from tests.support.runs import checkpoints_in


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFolder, Result]:
    """Return a run without faults, and its files; do not change them."""
    job = JobFolder(tmp_path_factory.mktemp("fault_free") / "job")
    return job, drive(config(Faults(job)), *FAST)


def test_a_run_ends_early_and_keeps_its_best_step(fault_free: tuple[JobFolder, Result]) -> None:
    job, result = fault_free
    steps, _ = committed(result)
    evaluations, (stopped,), best = decided(result)
    assert [step for step, _ in steps] == list(range(1, LAST + 1))
    assert [event["step"] for event in evaluations] == [2, 4, 6, 8, 10, 12]
    assert all(event["fit.samples"] == 23 for event in evaluations)
    values = {event["step"]: event["fit.r2"] for event in evaluations}
    assert max(values, key=lambda step: values[step]) == BEST
    assert stopped["step"] == LAST
    assert (stopped["best_step"], stopped["best"], stopped["waited"]) == (BEST, values[BEST], 2)
    assert (best["step"], best["metric"], best["value"]) == (BEST, "fit.r2", values[BEST])
    assert [event["step"] for event in result.events if event["event"] == "best"] == [2, 6, 8]
    assert result.event("summary")["metrics"]["fit.r2"] == values[LAST]
    folder = checkpoints_in(job.folder / "saved")
    assert [manifest.step for manifest in folder.valid()] == [LAST, BEST]
    exported = rpcmp("export", "--best", folder.path, job.folder / "model.safetensors")
    assert exported.out.startswith(f"step {BEST}, fit.r2 {values[BEST]:.4f}: ")


def test_faults_during_evaluation_and_after_the_best_step_change_no_bit(
    fault_free: tuple[JobFolder, Result], job: JobFolder
) -> None:
    faults = Faults(job).fail_at(1, BEST + 1, "SIGKILL", "forward")
    worker, driver = job.folder / "triggered-worker", job.folder / "struck-driver"
    planted = (
        *("--set", f"metrics.error.kwargs.marker={worker}"),  # in the rehearsal
        *("--set", f"metrics.fit.kwargs.marker={driver}"),
        # This call is in the second driver process, which has rehearsed two mini-batches.
        *("--set", "metrics.fit.kwargs.strikes_in=6"),
    )
    result = drive(config(faults), *FAST, *planted)
    assert committed(result) == committed(fault_free[1])
    assert decided(result) == decided(fault_free[1])
    assert (worker.exists(), driver.exists(), len(faults.triggered)) == (True, True, 1)
    found = [event["step"] for event in result.events if event["event"] == "fault"]
    assert found == [0, BEST, BEST]
    folder = checkpoints_in(job.folder / "saved")
    assert [manifest.step for manifest in folder.valid()] == [LAST, BEST]


@pytest.mark.cluster
def test_a_run_killed_after_its_best_step_finds_it_again(
    fault_free: tuple[JobFolder, Result], job: JobFolder
) -> None:
    path = config(Faults(job))
    with running("drive", path, "--json", *FAST) as run:
        run.wait_for_line(f'"best", "step": {BEST}')
        os.kill(run.pid, signal.SIGKILL)
        run.process.wait()
    result = drive(path, "--resume", *FAST)
    begin = result.event("resumed")["step"]
    assert begin >= BEST
    assert committed(result)[1] == committed(fault_free[1])[1]
    evaluations, *expected = decided(fault_free[1])
    assert decided(result)[0] == [event for event in evaluations if event["step"] >= begin]
    assert list(decided(result)[1:]) == expected


def test_an_unknown_metric_key_fails_before_the_first_step(
    job: JobFolder,
) -> None:
    """Only the driver needs the module of a metric with a state."""
    path = job.config("""
        ship_code = false
        evaluate_every_steps = 2
        steps = 4
        loss = "torch.nn:CrossEntropyLoss"
        early_stopping = { metric = "fit.mse" }
        metrics = { fit = "labels:Fit" }
        [model]
        layers = "rpcmp.examples.digits:layers"
        num_stages = 2
        [data]
        train = { callable = "rpcmp.examples.digits:dataset", kwargs = { split = "train" } }
        test = { callable = "rpcmp.examples.digits:dataset", kwargs = { split = "test" } }
    """)
    (job.folder / "labels.py").write_text(LABELS)
    result = drive(path)
    assert result.code == 2
    found = "early_stopping.metric = 'fit.mse': an evaluation gives loss, fit.r2, fit.samples"
    assert found in result.err
    assert [event for event in result.events if event["event"] == "step"] == []


LABELS = """
import measures, torch

class Fit(measures.Fit):
    def update(self, preds, target):
        super().update(preds.argmax(1).float(), target.float())
"""


def test_a_broken_metric_fails_before_the_first_step(job: JobFolder) -> None:
    metric = "metrics.wrong=torch.nn.functional:nll_loss"
    result = drive(config(Faults(job)), "--set", metric, "--set", "data.at=stage")
    assert result.code == 2
    assert not [event for event in result.events if event["event"] in ("step", "fault")]
    assert "tried on the first mini-batch of data.test before the first step" in result.err
    assert "nll_loss" in result.err


def test_a_failure_in_the_first_step_after_resuming_is_not_retried(job: JobFolder) -> None:
    kept = '[checkpoint]\ndir = "kept"\nevery_steps = 2'
    assert drive(Faults(job).config("steps = 2", stages=2, sections=kept)).code == 0
    faults = Faults(job).fail_at(1, 3, "exception", "forward", again=True)
    result = drive(faults.config("steps = 4", stages=2, sections=kept), "--resume")
    assert result.code == 1, result.err
    assert result.event("resumed")["step"] == 2
    assert [(each["stage"], each["step"]) for each in faults.triggered] == [(1, 3)]
    assert not [event for event in result.events if event["event"] in ("step", "fault")]


def test_a_failure_in_the_first_step_is_not_retried(job: JobFolder) -> None:
    faults = Faults(job).fail_at(1, 1, "exception", "forward", again=True)
    result = drive(faults.config("steps = 4", stages=2))
    assert result.code == 1
    assert [(each["stage"], each["step"]) for each in faults.triggered] == [(1, 1)]
    assert "failed in forward of micro-batch 0 at step 1: RuntimeError: planted" in result.err
    assert not [event for event in result.events if event["event"] in ("step", "fault")]
