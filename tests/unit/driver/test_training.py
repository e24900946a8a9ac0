"""The training loop and the tracer, with stages that only record calls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.datasets import Datasets
from rpcmp.driver.evaluation import Evaluation, Metrics
from rpcmp.driver.progress import Best, TrainingProgress
from rpcmp.driver.rounds import Batch, RoundHandle
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.tracing import Tracer
from rpcmp.driver.training import Training
from rpcmp.observability.events import Json
from rpcmp.observability.trace import chrome
from rpcmp.observability.trace.spans import Kind, Span
from rpcmp.pipelining.setting_grid import options_to_try
from rpcmp.pipelining.simulation import SharedCores
from rpcmp.rpc.messages import AfterRound, Mode, RoundHeader, StepReport, Trained
from rpcmp.worker.stage import Stage
from tests.support.twostages import STAGES, job

TESTED = {"train": "tests.zoo.models:dataset", "test": "tests.zoo.models:dataset", "batch_size": 5}
"""An epoch has two steps, and an evaluation has two mini-batches."""


class Stages:
    """Stages that log the driver's calls as "start1", "finish1", ...; the loss of step n is n.

    Attributes:
        optimizer: this object, which records the calls of the optimizers as well.
        is_held: whether steps are held.
        test_losses: the losses of evaluations, by step; 0.5 for all other steps.
        trained: samples in the smallest mini-batch of the run.
    """

    def __init__(self, config: Config, test_losses: dict[int, float] | None = None) -> None:
        self.test_losses = test_losses or {}
        self.log: list[str] = []
        self.ends: set[AfterRound] = set()
        self.optimizer = self
        self.is_held = config.holds_steps
        self.scaler = None
        self.trained = 0
        self._done = 0
        self._config = config

    @property
    def num_full_microbatches(self) -> int:
        return self._config.num_full_microbatches

    def require_enough(self, samples: int) -> None:
        self.trained = samples

    def warnings(self) -> list[str]:
        return []

    def tell_statistics(self) -> None: ...

    def start_step(
        self,
        batch: Batch,
        step: int,
        end: AfterRound,
        version: int = 0,
        save: bool = False,
    ) -> RoundHandle:
        self.log.append(f"start{step}" + ("+save" if save else ""))
        self.ends.add(end)
        return RoundHandle(RoundHeader(step, step, Mode.TRAIN, 1, 1, 1, after=end), list)

    def finish_step(self, started: RoundHandle) -> Trained:
        self.log.append(f"finish{started.number}")
        before, self._done = self._done, started.number
        return Trained(float(started.number), {} if self.is_held else self._reports(before))

    def end_step(self, started: RoundHandle, loss: float) -> dict[str, StepReport]:
        self.log.append(f"end{loss:.0f}")
        return self._reports(self._done)

    def settle(self) -> dict[str, StepReport]:
        self.log.append("settle")
        return self._reports(self._done)

    @property
    def workers(self) -> Self:
        return self

    def everywhere(self, method: Callable[..., Any], *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def shared_cores(self) -> list[SharedCores]:
        return []

    def save(self, step: int) -> None:
        self.log.append(f"save{step}")

    def step_scheduler(self, loss: float) -> None:
        self.log.append(f"scheduler {loss}")

    def evaluate(self, batch: Batch, step: int, own: Metrics) -> Evaluation:
        self.log.append(f"evaluate{step}")
        return Evaluation(batch.num_samples, self.test_losses.get(step, 0.5))

    @staticmethod
    def _reports(step: int) -> dict[str, StepReport]:
        return (
            {name: StepReport(step, {"F": 0.0}, {}, [step / 10]) for name in STAGES} if step else {}
        )


def train(
    config: Config, act: Callable[[Training], Any] = lambda training: training.run(True)
) -> tuple[Stages, list[Json]]:
    """Return the stages, and the reported events except for progress."""
    stages, reported = Stages(config), list[Json]()
    act(_training(config, stages, reported.append))
    return stages, [event for event in reported if event["event"] != "progress"]


def _training(
    config: Config,
    stages: Stages,
    report: Callable[[Json], None] = lambda event: None,
    stop: threading.Event | None = None,
    resumed: TrainingProgress | None = None,
    **more: Any,
) -> Training:
    """Return a training whose `report` gets the JSON form of events and of progress."""
    return Training(
        config,
        Datasets.load(config),
        cast(StageGroup, stages),
        lambda event: report(event.to_json()),
        report,
        stop or threading.Event(),
        resumed,
        **more,
    )


class Tuned(Stages):
    """Stages that may be rescheduled, and whose steps take longer than loading samples."""

    def finish_step(self, started: RoundHandle) -> Trained:
        time.sleep(0.005)
        return super().finish_step(started)

    def reschedule(self, config: Config) -> None:
        self.log.append(f"reschedule {config.options.without_count}")

    def memory(self) -> dict[str, dict[str, int]]:
        return {name: {"idle": 0, "peak": 1} for name in STAGES}

    def free_memory(self) -> dict[str, tuple[str, int | None]]:
        return dict.fromkeys(STAGES, ("here", 1 << 30))


def test_other_options_are_tried_while_no_step_is_in_progress() -> None:
    config = job(steps=60, num_microbatches=2, schedule="1f1b", max_in_flight=2)
    stages, events = Tuned(config), list[Json]()
    options = options_to_try(config)
    assert [one.without_count for one in options] == [
        "1f1b, max_in_flight 2",
        "1f1b, max_in_flight 2, 2 a message",
    ]
    _training(config, stages, events.append, options=options).run(evaluate=False)
    changes = [place for place, call in enumerate(stages.log) if call.startswith("reschedule")]
    assert changes
    for place in changes:
        assert stages.log[place - 1] == "settle"
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, 61))
    (found,) = [event for event in events if event["event"] == "schedule"]
    known = [event["options"] for event in events if event["event"] == "progress"]
    assert known[0] == [options[0].model_dump()]
    assert [one.model_dump() for one in options] in known  # while the second was tried
    (last,) = known[-1]
    assert ScheduleOptions(**last).without_count == found["chosen"]


def test_a_later_generation_goes_on_with_the_options_found() -> None:
    config = job(steps=6, num_microbatches=2, schedule="1f1b", max_in_flight=2)
    options = options_to_try(config)
    own, other = "1f1b, max_in_flight 2", "1f1b, max_in_flight 2, 2 a message"
    for found, first, starts in (
        ([options[1].model_dump()], [f"reschedule {other}"], [other]),
        ([options[0].model_dump(), options[1].model_dump()], [], [own]),
        ([{"schedule": "zbv"}], [], [own]),
        ([], [], []),
    ):
        stages = Tuned(config)
        progress = TrainingProgress(step=1, batch=1, options=found)
        reported = list[Json]()
        training = _training(config, stages, reported.append, resumed=progress, options=options)
        training.run(evaluate=False)
        assert [line for line in stages.log if line.startswith("reschedule")] == first
        told = [event["chosen"] for event in reported if event["event"] == "schedule"]
        assert told == starts


def test_the_next_step_starts_before_this_one_finishes() -> None:
    stages, _ = train(job(steps=4))
    assert stages.log == [
        *("start1", "start2", "finish1", "start3", "finish2", "start4", "finish3"),
        *("finish4", "settle"),
    ]
    assert stages.ends == {AfterRound.STEP}


def test_every_step_is_reported_once_with_the_reports_of_the_stages() -> None:
    for config in (job(steps=3), job(steps=3, max_grad_norm=1.0)):
        _, reported = train(config)
        assert [(event["step"], event["loss"]) for event in reported] == [(1, 1), (2, 2), (3, 3)]
        assert [event["learning_rate"] for event in reported] == pytest.approx([0.1, 0.2, 0.3])
        assert [event["epoch"] for event in reported] == [1, 1, 2]
        assert all(set(event["busy"]) == set(STAGES) for event in reported)


def test_held_steps_end_before_the_next_one_finishes() -> None:
    stages, _ = train(job(steps=3, max_grad_norm=1.0))
    assert stages.log == [
        *("start1", "start2", "finish1", "end1", "start3", "finish2", "end2", "finish3", "end3"),
        "settle",
    ]
    assert stages.ends == {AfterRound.HOLD}


def test_all_steps_are_done_before_a_scheduler_steps_and_before_an_evaluation() -> None:
    scheduler = {"callable": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}}
    stages, reported = train(job(epochs=2, scheduler=scheduler, data=TESTED))
    assert stages.log == [
        *("evaluate0", "start1", "start2", "finish1", "finish2", "settle"),
        *("scheduler 1.5", "evaluate2", "evaluate2"),
        *("start3", "start4", "finish3", "finish4", "settle"),
        *("scheduler 3.5", "settle", "evaluate4", "evaluate4"),
    ]
    assert [event["event"] for event in reported] == ["step", "step", "eval"] * 2


def test_stop_ends_the_run_after_the_steps_in_progress() -> None:
    config = job(steps=100)
    stages, stop = Stages(config), threading.Event()
    reported: list[Json] = []

    def report(event: Json) -> None:
        if event["event"] == "step":
            reported.append(event)
            stop.set()

    _training(config, stages, report, stop).run(evaluate=True)
    assert [event["step"] for event in reported] == [1, 2, 3]
    assert stages.log[-2:] == ["finish3", "settle"]


@pytest.mark.parametrize("loads_ahead", [False, True])
def test_segments_continue_each_other_and_leave_no_step_in_progress(loads_ahead: bool) -> None:
    losses: list[list[float]] = []

    def segments(training: Training) -> None:
        losses.extend(training.segment(steps, loads_ahead).losses for steps in (1, 2))

    stages, _ = train(job(steps=10), segments)
    assert losses == [[1.0], [2.0, 3.0]]
    assert stages.log == [
        *("start1", "finish1", "settle"),
        *("start2", "start3", "finish2", "finish3", "settle"),
    ]


class Recording:
    """Stages with recorded spans; the clock of the second stage is an hour ahead."""

    AHEAD = 3600 * 10**9

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0
        self._step = 0

    @property
    def workers(self) -> Self:
        return self

    def everywhere(self, method: Callable[..., Any], *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def record_spans(self, steps: int) -> dict[str, tuple[str, int]]:
        self.log.append(f"record {steps}")
        return {stage: (f"host of {stage}", 0) for stage in STAGES}

    def start(
        self, method: Callable[..., Any], args_of: Callable[[Member], tuple[int, int, int]]
    ) -> Callable[[], dict[str, tuple[int, list[Span]]]]:
        cursor, _, _ = args_of(job().workers[0])
        self.log.append(f"read from {cursor}")
        self._step += 1
        start = self._step * 10**6
        answers = {
            "stage0": [Span(Kind.FORWARD, self._step, 0, start, start, start + 1000)],
            "stage1": [
                Span(Kind.FORWARD, self._step, 0, *(self.AHEAD + start + t for t in (1, 2, 3)))
            ],
        }
        return lambda: {stage: (self._step, spans) for stage, spans in answers.items()}

    def rpc_sync(self, worker: Member, method: Callable[..., Any]) -> int:
        assert method is Stage.clock
        return self.now + (self.AHEAD if worker.stage == "stage1" else 0)


def test_a_trace_has_all_spans_on_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Recording()
    monkeypatch.setattr("rpcmp.driver.tracing.time.perf_counter_ns", lambda: stages.now)
    tracer = Tracer(job(), cast(StageGroup, stages))
    for step in range(1, 101):
        stages.now += 10**6
        tracer.after_step(step)
    tracer.write(tmp_path / "trace.json")
    assert stages.log == ["record 100", "read from 0", "read from 1", "read from 2"]
    read = chrome.read(tmp_path / "trace.json")
    first, second = read.tracks
    assert [track.host for track in read.tracks] == ["host of stage0", "host of stage1"]
    assert [span.step for span in first.spans] == [span.step for span in second.spans] == [1, 2, 3]
    for one, other in zip(first.spans, second.spans, strict=True):
        assert other.start_ns - one.start_ns == 2
    assert read.producers == {"stage0": (), "stage1": ("stage0",)}


def progress_of(config: Config) -> dict[int, TrainingProgress]:
    """Return the progress after each step of a run."""
    reported: list[Json] = []
    _training(config, Stages(config), reported.append).run(evaluate=True)
    return last_progress(reported)


def last_progress(reported: list[Json]) -> dict[int, TrainingProgress]:
    """Return the last progress of each step that a run has reported."""
    found = [event for event in reported if event["event"] == "progress"]
    return {event["step"]: TrainingProgress.from_message(event) for event in found}


def resume(config: Config, resumed: TrainingProgress) -> list[str]:
    """Return the calls that a run makes to the stages if it resumes from `resumed`."""
    stages = Stages(config)
    _training(config, stages, resumed=resumed).run(evaluate=True)
    return stages.log


WATCHING = {"scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau", "steps": 5}


def test_resumed_run_makes_the_calls_of_an_uninterrupted_run() -> None:
    config = job(**WATCHING)
    known = progress_of(config)
    assert resume(config, known[1]) == [
        *("start2", "finish2", "settle", "scheduler 1.5", "start3", "start4", "finish3"),
        *("finish4", "settle", "scheduler 3.5", "start5", "finish5", "settle"),
    ]
    assert resume(config, known[3]) == [
        *("start4", "finish4", "settle", "scheduler 3.5", "start5", "finish5", "settle"),
    ]
    assert resume(config, known[5]) == ["settle"]


def test_resumed_run_ends_an_epoch_once_after_its_last_step() -> None:
    config = job(**WATCHING)
    ended = progress_of(config)[4]
    assert resume(config, ended) == ["scheduler 3.5", "start5", "finish5", "settle"]
    beyond = replace(ended, has_ended_epoch=True)
    assert resume(config, beyond) == ["start5", "finish5", "settle"]


def test_resumed_run_repeats_an_evaluation_that_was_stopped() -> None:
    """The saved step has ended its epoch already, so schedulers do not step again."""
    where = {"checkpoint": {"dir": "saved"}, "recovery": {"enabled": False}}
    config = job(**WATCHING, **where, data=TESTED)

    class Stopped(Stages):
        def evaluate(self, batch: Batch, step: int, own: Metrics) -> Evaluation:
            if step:  # the rehearsal has step 0
                stop.set()
            return super().evaluate(batch, step, own)

    stages, stop = Stopped(config), threading.Event()
    training = _training(config, stages, stop=stop)
    training.run(evaluate=True)
    training.save()
    resumed = training.progress
    assert (resumed.step, resumed.has_ended_epoch, resumed.evaluated_after) == (2, True, 0)
    assert resume(config, resumed)[:3] == ["evaluate2", "evaluate2", "start3"]
    assert resume(config, replace(resumed, evaluated_after=2))[0] == "start3"
    again, stop = Stopped(config), threading.Event()
    _training(config, again, stop=stop, resumed=resumed).run(evaluate=True)
    assert again.log == ["evaluate2"]  # stopped again: no step follows


def test_due_steps_and_the_last_step_are_saved() -> None:
    config = job(steps=5, checkpoint={"dir": "saved", "every_steps": 2})

    def act(training: Training) -> None:
        done = threading.Thread(target=_answer_saves, args=[training], daemon=True)
        done.start()
        training.run(evaluate=False)
        training.save()

    stages, _ = train(config, act)
    assert [entry for entry in stages.log if entry.startswith(("start", "save"))] == [
        *("start1", "start2+save", "start3", "start4+save", "start5+save"),
    ]


def _answer_saves(training: Training) -> None:
    """Finish every checkpoint again and again, as the supervisor does, until the last step."""
    while training.progress.step < 5:
        for step in range(1, 6):
            training.saves.finish(step)
        threading.Event().wait(0.01)


def test_a_run_that_was_stopped_saves_its_last_step() -> None:
    config = job(steps=100, checkpoint={"dir": "saved"})
    stages, stop = Stages(config), threading.Event()
    stop.set()
    training = _training(config, stages, stop=stop)
    training.run(evaluate=True)
    training.save()
    assert stages.log[-1] == f"save{training.progress.step}"


def evaluations(log: list[str]) -> list[int]:
    """Return the evaluated steps without the rehearsal; each has two mini-batches."""
    steps = [entry.removeprefix("evaluate") for entry in log if entry.startswith("evaluate")]
    found = [int(step) for step in steps if step != "0"]
    assert found[::2] == found[1::2]
    return found[::2]


@pytest.mark.parametrize("count", [{"steps": 8}, {"epochs": 4}])
def test_evaluations_follow_steps_at_their_interval(count: dict[str, int]) -> None:
    stages, reported = train(job(evaluate_every_steps=3, data=TESTED, **count))
    assert evaluations(stages.log) == [3, 6, 8]
    evaluated = [(event["step"], event["epoch"]) for event in reported if event["event"] == "eval"]
    assert evaluated == [(3, 2), (6, 3), (8, 4)]
    assert stages.log[:12] == [  # no step is in progress during an evaluation
        *("evaluate0", "start1", "start2", "finish1", "start3", "finish2", "finish3", "settle"),
        *("evaluate3", "evaluate3", "start4", "start5"),
    ]


@pytest.mark.parametrize(
    ("steps", "batch_size", "fewest"), [(2, 4, 4), (3, 4, 2), (1, 1, 1), (1, 16, 10)]
)
def test_smallest_mini_batch_of_a_run_has_to_suffice(
    steps: int, batch_size: int, fewest: int
) -> None:
    stages, _ = train(job(steps=steps, data={**TESTED, "batch_size": batch_size}))
    assert stages.trained == fewest


def test_resumed_run_is_evaluated_after_the_same_steps() -> None:
    config = job(steps=8, evaluate_every_steps=3, data=TESTED)
    for step, resumed in progress_of(config).items():
        log = resume(config, resumed)
        # The evaluation of the step that it resumes from is done again: it may not have ended.
        assert evaluations(log) == [found for found in (3, 6, 8) if found >= step]


STOPPING = {"patience": 2, "min_delta": 0.01}
LOSSES = {2: 0.5, 4: 0.4, 6: 0.395, 8: math.nan, 10: 0.1}


def test_run_stops_early_if_evaluations_do_not_improve() -> None:
    config = job(steps=20, evaluate_every_steps=2, data=TESTED, early_stopping=STOPPING)

    def run(resumed: TrainingProgress | None = None) -> tuple[list[int], Json, list[Json]]:
        stages, reported = Stages(config, LOSSES), list[Json]()
        _training(config, stages, reported.append, resumed=resumed).run(evaluate=True)
        assert "start9" not in stages.log
        (stopped,) = [event for event in reported if event["event"] == "early_stop"]
        return evaluations(stages.log), stopped, reported

    evaluated, stopped, reported = run()
    assert evaluated == [2, 4, 6, 8]  # the last is not evaluated twice
    expected = {"step": 8, "best_step": 4, "best": 0.4, "waited": 2}
    assert expected.items() <= stopped.items()
    for step, resumed in last_progress(reported).items():
        evaluated, again, _ = run(resumed)
        assert evaluated == [found for found in (2, 4, 6, 8) if found >= step]
        assert again == stopped


def test_more_patience_resumes_a_run_that_had_stopped_early() -> None:
    config = job(steps=12, evaluate_every_steps=2, data=TESTED, early_stopping=STOPPING)
    training = _training(config, Stages(config, LOSSES))
    training.run(evaluate=True)
    patience = {**STOPPING, "patience": 3}
    patient = job(steps=12, evaluate_every_steps=2, data=TESTED, early_stopping=patience)
    stages = Stages(patient, LOSSES)
    _training(patient, stages, resumed=training.progress).run(True)
    assert evaluations(stages.log) == [8, 10, 12]


def test_the_best_step_is_saved_and_waited_for() -> None:
    losses = {2: 0.5, 4: 0.6, 6: math.nan, 8: 0.3, 10: 0.2}
    stages, training = _saving(5, losses)
    saved = [entry for entry in stages.log if "save" in entry or entry.startswith("evaluate")]
    assert saved == [
        *("evaluate0", "evaluate2", "evaluate2", "save2", "evaluate4", "evaluate4"),
        *("start5+save", "evaluate6", "evaluate6", "evaluate8", "evaluate8", "save8"),
        *("start10+save", "evaluate10", "evaluate10"),
    ]
    assert training.progress.best == Best("loss", "min", 0.2, 10)


def test_best_step_is_dropped_if_its_checkpoint_fails() -> None:
    stages, training = _saving(100, {2: 0.5, 4: 0.1, 6: 0.3}, failing=4)
    assert [entry for entry in stages.log if "save" in entry] == ["save2", "save4", "start6+save"]
    assert training.progress.best == Best("loss", "min", 0.3, 6)


def _saving(every: int, losses: dict[int, float], failing: int = 0) -> tuple[Stages, Training]:
    """Return a run whose supervisor finishes each checkpoint that the driver waits for."""
    section = {"dir": "saved", "every_steps": every, "best": "loss"}
    config = job(steps=max(losses), evaluate_every_steps=2, data=TESTED, checkpoint=section)
    stages = Stages(config, losses)

    def report(event: Json) -> None:
        if event["event"] == "progress" and event["awaits_save"]:
            step = event["step"]
            later = threading.Timer(0.01, lambda: training.saves.finish(step, step == failing))
            later.start()

    training = _training(config, stages, report)
    training.run(evaluate=True)
    return stages, training
