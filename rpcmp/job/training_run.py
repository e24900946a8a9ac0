"""A run of `rpcmp drive`: one job, from its config to its summary, over many generations.

    generation ──fault──> RecoveryLoop ──> servers ready ──> next generation, from the newest step
        │                    │                                that all stages still have
        └──done──> summary   └──final──> save what the servers hold, raise the error

Generations are invisible in the reported events: every step and every evaluation is reported once.
If a replayed step does not give the same loss as before, bit for bit, a warning says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rpcmp.checkpoint.files import require_place
from rpcmp.checkpoint.folder import newest_in
from rpcmp.config.schema import Config
from rpcmp.errors import (
    InterruptedJobError,
    RpcmpError,
    TakenOverError,
    WorkerDiedError,
    WorkerHungError,
    one_line,
)
from rpcmp.job import takeover
from rpcmp.job.autobalance import (
    balanced,
    needs_measuring,
    stage_hosts,
    with_saved_shares,
)
from rpcmp.job.recovery import RecoveryLoop
from rpcmp.job.restore_point import Start
from rpcmp.job.server_pool import ServerPool, forks_for
from rpcmp.job.stage_events import run_event
from rpcmp.job.takeover import CompletedRun, LostJob
from rpcmp.job.training_workload import TrainingWorkload
from rpcmp.job.vitals import VITALS_SECONDS, Vitals
from rpcmp.net.security import INSECURE, WARN_SECONDS, Security, watch
from rpcmp.observability.events import (
    Event,
    MeasuringEvent,
    PlanEvent,
    PlanOutcome,
    ResumedEvent,
    SharesEvent,
    SummaryEvent,
    WarningEvent,
)
from rpcmp.observability.events.training_events import EventStream
from rpcmp.pipelining.calibration import Forecast, summarize, what_was_wrong
from rpcmp.pipelining.partition import StageHost
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import count_stop_requests, handle_stop_signals

Report = Callable[[Event], None]


async def drive(
    config: Config,
    report: Report,
    connect: Sequence[str] | None = None,
    evaluate: bool = True,
    save_state: Path | None = None,
    trace: Path | None = None,
    start: Start = "either",
    timeline: float = 0.0,
    last_steps: Path | None = None,
    forks: Forks | None = None,
) -> SummaryEvent:
    """Train `config` to its end, and recover from faults on the way.

    The first SIGINT, SIGTERM or SIGHUP lets the running step finish. Another SIGINT or SIGTERM ends
    the job at once.

    Args:
        config: the job.
        report: called with every event from `RunEvent` to `SummaryEvent`, stamped, and about once
            per second with `VitalsEvent`; see rpcmp.observability.events.
        connect: addresses of running stage servers; see ServerPool.
        evaluate: whether to evaluate and write the report as well.
        save_state: where to save the final parameters and buffers, as safetensors.
        trace: where to write a trace of the run.
        start: "resume": go on from the newest checkpoint, if there is one; "fresh": start from the
            config, whatever checkpoints there are; "either": start from the config unless there are
            checkpoints that a config has asked for.
        timeline: seconds between two events `timeline`, which show the actions of a step; 0: none.
        last_steps: where to write a trace of the last steps at the end of the run; needs
            `timeline`.
        forks: forks the processes; None: the run has its own.

    Returns:
        The last event.

    Raises:
        RpcmpError: why the job did not come to its end; InterruptedJobError for a signal.
    """
    own_forks = forks_for(config, connect) if forks is None else contextlib.nullcontext(forks)
    order = order_to_train(evaluate, timeline, save_state, trace, last_steps)
    async with own_forks as processes:
        run = TrainingRun(config, connect, report, start, processes)
        task = asyncio.ensure_future(run.train(order))
        with handle_stop_signals(lambda signum: run.interrupt(signum, task)):
            try:
                return await completed(run, task)
            except RpcmpError as error:
                run.explain(error)
                raise
            finally:
                await run.close()


def order_to_train(
    evaluate: bool = True,
    timeline: float = 0.0,
    save_state: Path | None = None,
    trace: Path | None = None,
    last_steps: Path | None = None,
) -> Message:
    """Return the order for a driver process; for the arguments see `drive`."""
    files = {"save_state": save_state, "trace": trace, "last_steps": last_steps}
    paths = {key: str(path.absolute()) if path else "" for key, path in files.items()}
    return {"op": "train", "options": [], "evaluate": evaluate, "timeline": timeline, **paths}


async def completed(run: TrainingRun, task: asyncio.Future[SummaryEvent]) -> SummaryEvent:
    """Return the summary of `TrainingRun.train`; save, and raise, if a signal has ended it."""
    try:
        return await task
    except asyncio.CancelledError:
        if not run.signals:
            raise
        # Between two generations there is no step to finish.
        if count_stop_requests(run.signals) == 1 and run.saves_on(run.signals[0]):
            await run.leave()
        raise run.interruption() from None


class TrainingRun:
    """One run: measures what the config leaves open, trains, and stops on signals.

    Attributes:
        signals: those that have been received.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None,
        report: Report,
        start: Start,
        forks: Forks,
    ) -> None:
        self._config, self._connect = config, connect
        self._start = start
        self._forks = forks
        self._pool: ServerPool | None = None
        self._workload: TrainingWorkload | None = None
        self._loop: RecoveryLoop[SummaryEvent] | None = None
        self._vitals = Vitals()
        self._is_taken_over = self._is_done = False
        self._identity = ""
        self._leaving: asyncio.Future[None] | None = None
        self._events = EventStream(report, self._generation_number)
        self._report = self._events.emit
        self.signals: list[int] = []

    @property
    def step(self) -> int:
        return self._events.step

    async def train(self, order: Message) -> SummaryEvent:
        config, resumes = self._config, self._start == "resume"
        if resumes:
            config = with_saved_shares(config)
        pool = self._pool = ServerPool(config, self._connect, self._report, self._forks)
        pool.drops_held = self._start == "fresh"
        if resumes and (before := newest_in(config.checkpoint_folder, config.name)) is not None:
            pool.run_folder = before.name
        if not pool.is_local:  # own servers end with the driver, and remember nothing
            self._identity = await asyncio.to_thread(takeover.identity_of, self._config)
        # What is to be written, only training can give.
        asked = "" if order["trace"] or order["save_state"] else self._identity
        lost = await takeover.find(config, pool, asked) if resumes else None
        if isinstance(lost, CompletedRun):
            return self._repeat(config, lost)
        if lost is not None:
            config = lost.about.apply_to(config)
            pool.take_over(lost.job_id, lost.drivers, config, lost.about.places)
            pool.run_folder = lost.about.run_folder
        self._report(run_event(config, pool.job_id, pool.places))
        async with (
            _in_background(self._report_vitals()),
            _in_background(self._warn_of_security(pool.dialer.security)),
        ):
            return await self._train(config, pool, order, lost)

    def _repeat(self, config: Config, run: CompletedRun) -> SummaryEvent:
        """Report a run that was complete before its driver was lost, or ended, as it did."""
        config = run.about.apply_to(config)
        self._report(run_event(config, run.job_id, run.about.places))
        step = run.summary.steps
        self._report(ResumedEvent(step=step, run=run.about.run, changed=[], is_complete=True))
        self._report(run.summary)
        return run.summary

    async def _train(
        self, config: Config, pool: ServerPool, order: Message, lost: LostJob | None
    ) -> SummaryEvent:
        watches = config.rebalance != "off" and lost is None and not pool.is_local
        if watches or needs_measuring(config):
            self._report(MeasuringEvent())
        config, forecast = await self._measured(config)
        hosts: Sequence[StageHost] = ()
        if forecast is not None:
            hosts = forecast.hosts
        elif watches:
            hosts = await self._hosts_to_watch(config)
        for text in config.warnings:
            self._report(WarningEvent(text=text))
        if forecast is not None:
            start = await asyncio.to_thread(forecast.fastest_options, config)
            order = {**order, "options": [start.model_dump()]}
            prediction = forecast.predict(start.on(config).with_full_microbatches())
            self._report(PlanEvent(**asdict(prediction)))
            if forecast.note:
                self._report(WarningEvent(text=forecast.note))
        if config.balance_replicas:
            self._report(SharesEvent(shares=config.shares))
        workload = self._workload = TrainingWorkload(
            *(config, pool, self._events, self._vitals, self._start, order, self.signals),
            lost,
            self._identity,
            hosts,
        )
        if config.checkpoint is not None:
            await asyncio.to_thread(require_place, config.checkpoint_folder)
        await pool.open()
        self._loop = RecoveryLoop(config.recovery, pool, workload)
        recovery = config.recovery
        if self._start == "resume" and recovery.enabled and recovery.spares and not pool.is_local:
            await pool.wait_until_ready()  # a host may be lost together with the driver
        try:
            summary = await self._loop.run()
        except TakenOverError:
            self._is_taken_over = True
            raise
        self._is_done = True
        if forecast is not None and not workload.has_moved:  # it is of the first balance
            outcome = _compared(config.with_full_microbatches(), forecast, self._events)
            summary = replace(summary, plan=outcome)
        self._report(summary)
        return summary

    async def _measured(self, config: Config) -> tuple[Config, Forecast | None]:
        """Measure what the config leaves open; once more if a process is lost meanwhile."""
        for _ in range(config.recovery.max_restarts if config.recovery.enabled else 0):
            try:
                return await balanced(config, self._connect, self._forks, rehearses=True)
            except (WorkerDiedError, WorkerHungError) as error:
                self._report(WarningEvent(text=f"{error}; the job is measured once more"))
        return await balanced(config, self._connect, self._forks, rehearses=True)

    async def _hosts_to_watch(self, config: Config) -> Sequence[StageHost]:
        """Measure the hosts of a run whose layers may move; see `BalanceWatch`."""
        try:
            return await stage_hosts(config.with_full_microbatches(), self._connect, self._forks)
        except RpcmpError as error:
            text = (
                "the hosts could not be measured, so `rebalance` takes them for equally fast, and "
                f"the layers of a stage for equal: {one_line(error)}"
            )
            self._report(WarningEvent(text=text))
            return ()

    def interrupt(self, signum: int, task: asyncio.Future[SummaryEvent]) -> None:
        """Stop the run after its step on the first signal while training, else at once."""
        before = count_stop_requests(self.signals)
        self.signals.append(signum)
        if count_stop_requests(self.signals) == before:
            return
        if not before and self._workload is not None and self._workload.is_training:
            self._workload.finish_step(save=self.saves_on(signum))
        else:
            (self._leaving or task).cancel()

    def rebalance(self, balance: list[int], reason: str = "") -> None:
        """Go on with these numbers of layers per stage after the running step, if it trains."""
        if self._workload is not None:
            self._workload.rebalance(balance, reason)

    def saves_on(self, signum: int) -> bool:
        """Return whether a signal saves: a Ctrl-C does only if the config asks for checkpoints."""
        return signum != signal.SIGINT or self._config.checkpoint is not None

    def interruption(self) -> InterruptedJobError:
        """Return the error of a run that a signal has ended at once."""
        if self._workload is None:
            return InterruptedJobError(self.signals[-1], self.step)
        return self._workload.interruption(self.signals[-1])

    async def leave(self) -> None:
        """Stop at once, with a checkpoint of the snapshots that the servers hold.

        Another signal does without the checkpoint.
        """
        if self._loop is None or self._workload is None or self._loop.generation is None:
            return
        await self._loop.close()
        if count_stop_requests(self.signals) > 1:
            return
        self._leaving = asyncio.ensure_future(self._workload.checkpoints.leave())
        await asyncio.wait([self._leaving])
        if not self._leaving.cancelled():
            self._leaving.result()

    def _may_free(self, pool: ServerPool, workload: TrainingWorkload) -> bool:
        """Return whether what the servers hold may be dropped.

        Not if another driver has the job now, nor if this one was to take it over and could not:
        another try may do better. Nor if steps could not be saved, until there is room for them.
        """
        if self._is_taken_over or self._holds_unsaved(workload):
            return False
        return workload.has_begun or not pool.supersedes

    def _holds_unsaved(self, workload: TrainingWorkload) -> bool:
        is_unsaved = workload.checkpoints.is_behind and not self._is_done
        return is_unsaved and workload.held_seconds > 0

    def explain(self, error: RpcmpError) -> None:
        """Add to an error that has ended the run where its steps are."""
        if self._workload is not None and self._holds_unsaved(self._workload):
            error.add_note(
                f"its stage servers hold the newest steps for {self._workload.held_seconds:g} s: "
                "the same command with --resume goes on there, and other jobs are refused, unless "
                "by --fresh"
            )

    async def close(self) -> None:
        if self._workload is not None:
            await self._workload.wait_for_removal()
        if self._loop is not None:
            await self._loop.close()
        pool, workload = self._pool, self._workload
        if pool is not None and workload is not None and self._may_free(pool, workload):
            await pool.free(workload.checkpoints.generation)

    async def _report_vitals(self) -> None:
        await self._vitals.wait()
        while True:
            self._report(self._vitals.event(self.step))
            await asyncio.sleep(VITALS_SECONDS)

    async def _warn_of_security(self, security: Security) -> None:
        """Warn each minute that the job is insecure, if it is; otherwise watch its certificates."""

        def warn(text: str) -> None:
            self._report(WarningEvent(text=text))

        while self._config.security.insecure:
            warn(INSECURE)
            await asyncio.sleep(WARN_SECONDS)
        await watch(security, warn)

    def _generation_number(self) -> int:
        return 1 if self._workload is None else self._workload.checkpoints.generation


@contextlib.asynccontextmanager
async def _in_background(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine as a task that is cancelled at the end of the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _compared(config: Config, forecast: Forecast, events: EventStream) -> PlanOutcome:
    """Compare what is predicted under the options at the end with the newest steps under them.

    Args:
        config: from `Config.with_full_microbatches`.
    """
    chosen, steps = events.chosen, list(events.recent_steps)
    seconds, wrong = None, ""
    if chosen is not None:
        config = config.model_copy(update=chosen.options)
        steps = [step for step in steps if step.step > chosen.step]
        seconds = chosen.measured.get(chosen.chosen)  # unless there are steps after it
    predicted = forecast.predict(config)
    if steps := steps[1:] or steps:  # the first warms up, or finds an empty pipeline
        measured = summarize(config, steps)
        seconds, wrong = measured.step_s, what_was_wrong(config, predicted, measured)
    return {
        "balance": predicted.balance,
        "predicted_step_s": predicted.step_s,
        "measured_step_s": seconds,
        "wrong": wrong,
    }
