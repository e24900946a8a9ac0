"""The training loop: epochs, steps, evaluations, and their events.

The next step starts before this one has ended: its data is loaded, and its first forwards run,
while earlier stages still finish their backwards. The stages report on a step in their first
response of the next one, so the event of a step is emitted then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rpcmp.config import importing
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.data.batches import Loaded
from rpcmp.driver.datasets import Datasets, fewest_samples
from rpcmp.driver.evaluation import Metrics
from rpcmp.driver.evaluator import Evaluator
from rpcmp.driver.progress import Best, CheckpointCadence, EarlyStopping, TrainingProgress
from rpcmp.driver.rounds import RoundHandle
from rpcmp.driver.self_tuning import SelfTuning
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.step_stream import Step, StepStream, with_stage_reports
from rpcmp.driver.tracing import StepSampler, Tracer
from rpcmp.errors import FactoryError
from rpcmp.observability.events import (
    EarlyStopEvent,
    EvalEvent,
    Event,
    ReportEvent,
    StepEvent,
    WarningEvent,
)
from rpcmp.pipelining.cost_model import STEPS_AHEAD
from rpcmp.process.activity import Activity
from rpcmp.rpc.messages import AfterRound, StepReport
from rpcmp.worker.stage import Stage


class SegmentTotals(NamedTuple):
    """Measurements of consecutive steps.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time of the driver process.
        losses: one per step.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]


class Training:
    """One run of a config.

    Args:
        send_progress: called after each step with the state from which a later generation resumes.
        stop: if another thread sets it, the run ends after the steps in progress.
        resumed: the progress from which the run resumes; None: it starts.
        tracers: called after every step.
        metrics: the metrics that the driver computes.
        options, restarts: see `SelfTuning`.

    Attributes:
        progress: the state after the last step.
        saves: the schedule of checkpoints.
        total_steps: of the whole run.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        group: StageGroup,
        report: Callable[[Event], None],
        send_progress: Callable[[dict[str, Any]], None],
        stop: threading.Event,
        resumed: TrainingProgress | None = None,
        activity: Activity | None = None,
        tracers: Sequence[Tracer | StepSampler] = (),
        metrics: Metrics | None = None,
        options: Sequence[ScheduleOptions] = (),
        restarts: int = 0,
    ) -> None:
        self._config = config
        self._group, self._workers = group, config.workers
        self._report = report
        self._send_progress = send_progress
        self._activity = activity or Activity()
        self._steps = StepStream(config, datasets.train, self._activity, stop)
        self.total_steps = self._steps.total
        self.progress = (resumed or TrainingProgress()).for_config(config)
        saved = self.progress.step if self.progress.is_saved else 0
        self._told = {""}
        self._steps.seek(self.progress.step, self.progress.stream, self._tell)
        self.saves = CheckpointCadence(config, self.total_steps, saved, self.progress.since_saved)
        self._stop = stop
        self._tracers = tracers
        self._evaluator = Evaluator(
            config, datasets.test, group, metrics or Metrics({}), stop, self._activity
        )
        self._evaluates = False
        self._evaluated_after = -1
        self._in_progress: deque[tuple[Step, RoundHandle]] = deque()
        self._unreported: StepEvent | None = None
        self._last: StepEvent | None = None
        self._epoch_ended_after = 0
        self._ended = 0.0
        self._segment: list[float] | None = None
        self._endless = self._steps.after(self.progress.step)
        group.require_enough(fewest_samples(config, datasets.train))
        group.tell_statistics()
        for text in group.warnings():
            report(WarningEvent(text=text))
        self._tuning = SelfTuning(
            *(config, group, options, self.progress, self.total_steps, report, restarts)
        )

    def run(self, evaluate: bool) -> None:
        """Train to the end of the run, or until `stop` is set.

        Args:
            evaluate: whether to evaluate as the config says and at the end, and write the report.
        """
        self._evaluates = evaluate
        self._tuning.start()
        if evaluate and self.progress.step == 0 and (warning := self._evaluator.rehearse()):
            self._report(WarningEvent(text=warning))
        self._resume_after()
        is_stopped = self._stop.is_set() and self.progress.step > 0  # in that evaluation
        if self._early_stop is None and not is_stopped:
            self._train(self._steps.after(self.progress.step))
        self._tuning.close()
        if self._stop.is_set() and self.progress.step:
            self._report_progress()  # with nothing on trial
        if (state := self._early_stop) is not None:
            state = replace(state, step=self.progress.step)
            self._report(EarlyStopEvent(**asdict(state)))
        if evaluate and not self._stop.is_set():
            if self._evaluated_after != self.progress.step:
                self._evaluate(self.progress.epoch)
            self._write_report()

    def save(self) -> None:
        """Start a checkpoint of the present step, unless there is one; does not wait for disks."""
        step = self.progress.step
        if step == 0 or self.saves.includes(step) or not self._config.takes_snapshots:
            return
        self.saves.start(step)
        self._snapshot(Stage.save)

    def keep(self) -> None:
        """Let all stages hold their present state in memory, for another group to start from."""
        step = self.progress.step
        if step > 0 and not self._is_kept(step) and not self.saves.includes(step):
            self._snapshot(Stage.keep)

    def _snapshot(self, take: Callable[..., Any]) -> None:
        step = self.progress.step
        if self._epoch_ended_after == step and not self._is_kept(step):
            # No stage has its state of before its scheduler stepped any more.
            self.progress = replace(self.progress, has_ended_epoch=True)
        self._report_progress()
        self._group.workers.everywhere(take, step)

    def segment(self, steps: int, loads_ahead: bool) -> SegmentTotals:
        """Train the next `steps` steps, and wait until all stages have done them.

        Args:
            loads_ahead: whether their samples are loaded before the clock starts.
        """
        loaded: Iterable[Step] = itertools.islice(self._endless, steps)
        if loads_ahead:
            loaded = list(loaded)
        started, cpu = time.perf_counter(), time.process_time()
        losses = self._segment = []
        self._train(loaded)
        return SegmentTotals(time.perf_counter() - started, time.process_time() - cpu, losses)

    def _train(self, steps: Iterable[Step]) -> None:
        self._ended = time.perf_counter()
        for step in steps:
            if self._tuning.is_changing:
                self._drain()
                self._tuning.change(step.number)
                self._report_progress()
            self._in_progress.append((step, self._start(step)))
            if len(self._in_progress) == STEPS_AHEAD:
                self._finish(*self._in_progress.popleft())
            if self._must_drain(step):
                self._drain()
                self._after_drained(step)
                self._ended = time.perf_counter()  # none of that is the next step's
                self._tuning.has_drained(step.number)
            if self._stop.is_set() or self._early_stop is not None:
                break
        self._drain()

    def _resume_after(self) -> None:
        """Repeat what follows a step, if the run resumes right after it."""
        last = self.progress
        ends_epoch = self._steps.ends_epoch(last.batch)
        step = Step(last.step, last.epoch, ends_epoch, Loaded(None), 0.0)
        if last.step and not last.has_ended_epoch and self._must_drain(step):
            self._after_drained(step)
        elif (
            last.has_ended_epoch
            and last.evaluated_after != last.step
            and self._is_evaluation_due(step)
        ):
            self._evaluate(last.epoch)  # the run was stopped during that evaluation
        elif last.best is not None and last.best.step == last.step:
            self._keep_best(None)

    def _must_drain(self, step: Step) -> bool:
        """Return whether all stages must have done this step before the next one starts."""
        steps_scheduler = step.ends_epoch and self._config.steps_scheduler("epoch")
        return steps_scheduler or self._is_evaluation_due(step)

    def _is_evaluation_due(self, step: Step) -> bool:
        if not self._evaluates or step.number == self.total_steps:
            return False
        return self._evaluator.is_due(step.number, step.epoch, step.ends_epoch)

    @property
    def _early_stop(self) -> EarlyStopping | None:
        """The state of early stopping if it ends the run here."""
        section, state = self._config.early_stopping, self.progress.stopping
        if not self._evaluates or section is None or state is None:
            return None
        return state if state.is_over(section.patience) else None

    def _drain(self) -> None:
        """Wait until all stages have done all started steps, and report them."""
        while self._in_progress:
            self._finish(*self._in_progress.popleft())
        self._report_step(self._group.settle())

    def _start(self, step: Step) -> RoundHandle:
        end = AfterRound.HOLD if self._config.holds_steps else AfterRound.STEP
        if self.saves.would_wait(step.number):
            self._drain()  # a stage that has failed never saves, and says so only there
        self._activity.stop()  # the next line may wait for a disk
        save = self.saves.start_if_due(step.number)
        self._activity.start("step", step.number)
        version = step.number if save or self._is_kept(step.number) else 0
        return self._group.start_step(step.batch, step.number, end, version, save)  # stage.py [1]

    def _is_kept(self, step: int) -> bool:
        """Return whether all stages keep a snapshot of `step` in memory."""
        every = self._config.snapshot_every_steps
        return every > 0 and step % every == 0

    def _finish(self, step: Step, started: RoundHandle) -> None:
        """Wait for a step, and report the step before it, whose reports arrive with this one."""
        trained = self._group.finish_step(started)
        self._report_step(trained.reports)
        if self._config.holds_steps:
            reports = self._group.end_step(started, trained.loss)
        now = time.perf_counter()
        event = step.event(trained.loss, now - self._ended)
        scaler = self._group.optimizer.scaler
        if scaler is not None:
            before = self.progress.scaler or scaler.initial
            event = replace(
                event,
                loss_scale=before.scale,
                is_skipped=scaler.state.skipped > before.skipped,
                skipped_steps=scaler.state.skipped,
            )
        state = None if scaler is None else scaler.state
        stream = self._position_after(step.number)
        self.progress = self.progress.after(step.number, step.epoch, trained.loss, state, stream)
        self._last = self._unreported = event
        self._report_progress()
        self._ended = now
        if self._config.holds_steps:
            self._report_step(reports)
        if self._segment is not None:
            self._segment.append(trained.loss)
        for tracer in self._tracers:
            tracer.after_step(step.number)

    def _position_after(self, step: int) -> str:
        """Return where a stream of samples is after a step, and report what is odd about it."""
        position = self._steps.position_after(step)
        if position is None:
            return ""
        self._tell(position.last.note)
        return position.dump()

    def _tell(self, warning: str) -> None:
        """Report a warning once; an empty one not at all."""
        if warning not in self._told:
            self._told.add(warning)
            self._report(WarningEvent(text=warning))

    def _report_step(self, stages: dict[str, StepReport]) -> None:
        """Emit the event of the last step that has ended, with the stages' reports on it."""
        if self._unreported is None:
            return
        event, self._unreported = self._unreported, None
        whole = with_stage_reports(event, self._workers, stages)
        self._last = whole if self._last is event else self._last
        self._report(whole)  # stage.py [16]
        self._tuning.add(whole)

    def _report_progress(self) -> None:
        """Send the state from which a later generation can resume."""
        awaits_save = self.saves.includes(self.progress.step)
        last_event = None if self._last is None else self._last.to_json()
        options = self._tuning.known
        more = {"told": last_event, "awaits_save": awaits_save, "options": options}
        self._send_progress({"event": "progress", **asdict(self.progress), **more})

    def _after_drained(self, step: Step) -> None:
        """Step the schedulers, and evaluate, after a step that all stages have done."""
        if step.ends_epoch:
            self._epoch_ended_after = step.number
            if self._config.scheduler_interval == "epoch":
                self._group.optimizer.step_scheduler(self.progress.mean_loss)
        if self._is_evaluation_due(step) and not self._stop.is_set():
            self._evaluate(step.epoch)

    def _evaluate(self, epoch: int) -> None:
        step, before = self.progress.step, self.progress.best
        values = self._evaluator.run(step, epoch)
        if values is None:
            return
        self._evaluated_after = step
        self._report(EvalEvent(step=step, epoch=epoch, values=values))
        self.progress = self.progress.evaluated(self._config, values)
        if self.progress.best is not None and self.progress.best.step == step:
            self._keep_best(before)
        else:
            self._report_progress()

    def _keep_best(self, before: Best | None) -> None:
        """Save this step, the best so far; `before`, the previous one, is kept if that fails."""
        self.save()
        self._report_progress()
        self._activity.stop()
        # After a fault the stages may only have later steps, and this one could not be saved then.
        self.saves.wait()
        step = self.progress.step
        if self.saves.has_failed(step):
            kept = before if before is not None and before.step < step else None
            self.progress = replace(self.progress, best=kept)
            self._report_progress()

    def _write_report(self) -> None:
        if self._config.report is None or self._stop.is_set():
            return
        self._activity.start("report", self.progress.step)
        write = importing.resolve(self._config.report.callable, "report")

        def predict(inputs: Any) -> Any:
            return self._group.predict(inputs, self.progress.step)

        try:
            text = str(write(predict, **self._config.report.kwargs))
        except Exception as error:
            raise FactoryError(f"report failed: {importing.explain_error(error)}") from error
        self._report(ReportEvent(text=text))
