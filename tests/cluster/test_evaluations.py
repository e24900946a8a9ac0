"""Real runs that decide by their evaluations: early stopping, and the best step that is kept.

after step   2      4      6      8      10     12
fit.r2     -0.72  -1.76  -0.62   0.02  -1.35  -1.42      best: 8; patience 2: over after 12
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Faults, committed, drive
from tests.support.places import ROOT
from tests.support.processes import JobFolder, Result, rpcmp, running, unstamped
from tests.support.runs import checkpoints_in

BEST, LAST = 8, 12

SECTIONS = """
[metrics]
error = "measures:error"
fit = { callable = "measures:Fit" }
[early_stopping]
metric = "fit.r2"
patience = 2
[checkpoint]
dir = "saved"
every_steps = 5
keep = 1
best = "fit.r2"
[data]
train = "zoo:regression"
test = { callable = "zoo:regression", kwargs = { samples = 23 } }
batch_size = 10
"""

FAST = [
    part
    for override in ("optimizer.kwargs.lr=0.02", "scheduler.kwargs.gamma=1.0", "seed=22")
    for part in ("--set", override)
]


def config(faults: Faults) -> Path:
    return faults.config("steps = 40\nevaluate_every_steps = 2", stages=2, sections=SECTIONS)


def decided(result: Result) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Every evaluation, why the run ended early if it did, and which step was the best."""
    evaluations, stops = (
        [unstamped(event) for event in result.events if event["event"] == kind]
        for kind in ("eval", "early_stop")
    )
    best = result.event("summary")["best"]
    return evaluations, stops, {**best, "path": Path(best["path"]).name}


def require_refused(result: Result, which: str, said: str) -> None:
    """The run ended before its first step, since a mini-batch could not be evaluated."""
    assert result.code == 2
    assert not [event for event in result.events if event["event"] in ("step", "fault")]
    assert f"tried on the {which} mini-batch of data.test before the first step" in result.err
    assert said in result.err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFolder, Result]:
    """A run that lost nothing, and its files; not to be changed."""
    job = JobFolder(tmp_path_factory.mktemp("undisturbed") / "job")
    return job, drive(config(Faults(job)), *FAST)


def test_a_run_ends_early_and_keeps_its_best_step(undisturbed: tuple[JobFolder, Result]) -> None:
    job, result = undisturbed
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


@pytest.mark.long
def test_what_is_evaluated_does_not_change_what_is_trained(
    undisturbed: tuple[JobFolder, Result], job: JobFolder
) -> None:
    path = Faults(job).config(f"steps = {LAST}", stages=2)
    assert committed(drive(path, *FAST)) == committed(undisturbed[1])


def test_faults_in_an_evaluation_and_after_the_best_step_change_nothing(
    undisturbed: tuple[JobFolder, Result], job: JobFolder
) -> None:
    faults = Faults(job).fail_at(1, BEST + 1, "forward", "SIGKILL")
    worker, driver = job.folder / "struck-worker", job.folder / "struck-driver"
    planted = (
        *("--set", f"metrics.error.kwargs.marker={worker}"),  # in the rehearsal
        *("--set", f"metrics.fit.kwargs.marker={driver}"),
        # Of the second driver process, which has rehearsed two mini-batches.
        *("--set", "metrics.fit.kwargs.strikes_in=6"),
    )
    result = drive(config(faults), *FAST, *planted)
    assert committed(result) == committed(undisturbed[1])
    assert decided(result) == decided(undisturbed[1])
    assert (worker.exists(), driver.exists(), len(faults.struck)) == (True, True, 1)
    found = [event["step"] for event in result.events if event["event"] == "fault"]
    assert found == [0, BEST, BEST]
    folder = checkpoints_in(job.folder / "saved")
    assert [manifest.step for manifest in folder.valid()] == [LAST, BEST]


@pytest.mark.long
@pytest.mark.parametrize("evaluated", ["evaluate_every_steps = 2", "evaluate_every = 1"])
def test_a_fault_while_the_best_step_is_saved_changes_nothing(
    job: JobFolder, tmp_path: Path, evaluated: str
) -> None:
    """Steps of which no snapshot is kept: the best is copied after its evaluation."""
    rare = ("--set", "recovery.mirror_every_steps=3", "--set", "checkpoint.every_steps=100")
    whole = Faults(JobFolder(tmp_path / "whole"))
    text = f"steps = 40\n{evaluated}"
    expected = drive(whole.config(text, stages=2, sections=SECTIONS), *FAST, *rare)
    best = expected.event("summary")["best"]["step"]
    assert best % 3
    faults = Faults(job).fail_at(1, best, "saving", "SIGKILL")
    result = drive(faults.config(text, stages=2, sections=SECTIONS), *FAST, *rare)
    assert len(faults.struck) == 1
    assert committed(result) == committed(expected)
    assert decided(result) == decided(expected)
    assert checkpoints_in(job.folder / "saved").path_of(best).is_dir()


def test_a_run_that_was_killed_after_its_best_step_finds_it_again(
    undisturbed: tuple[JobFolder, Result], job: JobFolder
) -> None:
    path = config(Faults(job))
    with running("drive", path, "--json", *FAST) as run:
        run.wait_for_line(f'"best", "step": {BEST}')
        os.kill(run.pid, signal.SIGKILL)
        run.process.wait()
    result = drive(path, "--resume", *FAST)
    begin = result.event("resumed")["step"]
    assert begin >= BEST
    assert committed(result)[1] == committed(undisturbed[1])[1]
    evaluations, *expected = decided(undisturbed[1])
    assert decided(result)[0] == [event for event in evaluations if event["step"] >= begin]
    assert list(decided(result)[1:]) == expected


@pytest.mark.long
def test_a_run_that_has_stopped_stays_so_unless_it_gets_more_patience(job: JobFolder) -> None:
    path = config(Faults(job))
    first = drive(path, *FAST)
    again = drive(path, "--resume", *FAST)
    assert (again.code, again.losses) == (0, [])
    assert decided(again)[1:] == decided(first)[1:]
    patient = drive(path, "--resume", *FAST, "--set", "early_stopping.patience=3")
    assert patient.code == 0
    assert patient.event("resumed")["changed"] == ["early_stopping.patience"]
    assert patient.event("early_stop")["step"] == LAST + 2
    assert patient.event("summary")["best"]["step"] == BEST


@pytest.mark.usefixtures("own_forks")
def test_a_key_that_a_metric_does_not_have_ends_the_run_before_its_first_step(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the module of a metric with a state is needed by the driver alone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for tests.zoo.models
    path = job.config("""
        ship_code = false
        evaluate_every_steps = 2
        steps = 4
        early_stopping = { metric = "fit.mse" }
        metrics = { fit = "measures:Fit" }
        [model]
        layers = "tests.zoo.models:layers"
        num_stages = 2
        [data]
        train = "tests.zoo.models:dataset"
        test = "tests.zoo.models:dataset"
    """)
    result = drive(path)
    assert result.code == 2
    found = "early_stopping.metric = 'fit.mse': an evaluation gives loss, fit.r2, fit.samples"
    assert found in result.err
    assert [event for event in result.events if event["event"] == "step"] == []


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("torch.nn.functional:cosine_similarity", "metrics.wrong"),
        ("torch.nn.functional:nll_loss", "nll_loss"),
    ],
)
def test_a_metric_that_fails_does_so_before_the_first_step(
    job: JobFolder, at: str, metric: str, said: str
) -> None:
    path = config(Faults(job))
    result = drive(path, "--set", f"metrics.wrong={metric}", "--set", f"data.at={at}")
    require_refused(result, "first", said)


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_an_evaluation_that_fails_does_so_before_the_first_step_without_any_metric(
    job: JobFolder, at: str
) -> None:
    """Samples with 7 features instead of 8."""
    path = job.config(f"""
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [data]
        train = "zoo:regression"
        test = {{ callable = "torch:ones", kwargs = {{ size = [20, 7] }} }}
        at = "{at}"
    """)
    result = drive(path)
    require_refused(result, "first", "mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_an_evaluation_whose_last_mini_batch_is_too_small_fails_before_the_first_step(
    job: JobFolder, at: str
) -> None:
    """Without running statistics batch normalization needs two samples there as well."""
    (job.folder / "still.py").write_text(
        "from torch import nn\n"
        "norm = nn.BatchNorm1d(8, track_running_stats=False)\n"
        "layers = lambda: [('norm', norm), ('head', nn.Linear(8, 1))]\n"
    )
    path = job.config(f"""
        [model]
        layers = "still:layers"
        balance = [1, 1]
        [data]
        train = {{ callable = "zoo:regression", kwargs = {{ samples = 16 }} }}
        test = {{ callable = "zoo:regression", kwargs = {{ samples = 17 }} }}
        batch_size = 8
        at = "{at}"
    """)
    result = drive(path)
    require_refused(result, "last", "Expected more than 1 value per channel")


LATE = """
class Late:
    def reset(self):
        self.seen = 0
    def update(self, outputs, targets):
        self.seen += len(targets)
    def compute(self):
        return 1 / (self.seen - 10)
"""
"""Like a recall of classes that the first mini-batch, 10 samples, has none of."""


def test_a_metric_for_which_one_mini_batch_is_not_enough_is_a_warning(
    job: JobFolder, tmp_path: Path
) -> None:
    (job.folder / "late.py").write_text(LATE)
    sections = SECTIONS.partition("[checkpoint]")[0].partition("fit =")[0]
    data = SECTIONS[SECTIONS.index("[data]") :]
    path = Faults(job).config(
        "steps = 3", stages=2, sections=f'{sections}late = "late:Late"\n{data}'
    )
    result = drive(path)
    (text,) = [event["text"] for event in result.events if event["event"] == "warning"]
    assert text.startswith(
        "metrics.late failed in compute(): ZeroDivisionError: division by zero; tried on one "
        "mini-batch of data.test before the first step."
    )
    assert "\n" not in text
    assert result.event("eval")["late"] == 1 / 13
    untried = Faults(JobFolder(tmp_path / "untried")).config("steps = 3", stages=2)
    assert committed(result) == committed(drive(untried))


def test_what_fails_in_the_first_step_of_a_resumed_run_is_not_tried_again(job: JobFolder) -> None:
    kept = '[checkpoint]\ndir = "kept"\nevery_steps = 2'
    assert drive(Faults(job).config("steps = 2", stages=2, sections=kept)).code == 0
    faults = Faults(job).fail_at(1, 3, "forward", "exception", again=True)
    result = drive(faults.config("steps = 4", stages=2, sections=kept), "--resume")
    assert result.code == 1, result.err
    assert result.event("resumed")["step"] == 2
    assert [(each["stage"], each["step"]) for each in faults.struck] == [(1, 3)]
    assert not [event for event in result.events if event["event"] in ("step", "fault")]


def test_what_fails_in_the_first_step_is_not_tried_again(job: JobFolder) -> None:
    faults = Faults(job).fail_at(1, 1, "forward", "exception", again=True)
    result = drive(faults.config("steps = 4", stages=2))
    assert result.code == 1
    assert [(each["stage"], each["step"]) for each in faults.struck] == [(1, 1)]
    assert "failed in forward of micro-batch 0 at step 1: RuntimeError: planted" in result.err
    assert not [event for event in result.events if event["event"] in ("step", "fault")]
