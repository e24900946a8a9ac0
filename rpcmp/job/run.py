"""One run of a job, over as many generations as it takes.

    generation ──fault──> decide ──go on──> servers ready? ──> next generation, from the newest
        │                    │                                  step that all stages still have
        └──done──> summary   └──enough──> a checkpoint is left, the error raised

What is told outside knows nothing of generations: every step and every evaluation is reported once.
A replayed step must give the same loss as before, bit for bit, or a warning says so.

What is told of a run before anything else: what it is, of which parts, and where they are.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rpcmp.checkpoint.files import require_place
from rpcmp.checkpoint.runs import newest_in
from rpcmp.config.redaction import redacted
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import DrainingError, InterruptedJobError, JobError, RpcmpError, SavingError
from rpcmp.job.autobalance import balanced, shares_of_before
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.generation import Generation
from rpcmp.job.recovery import History, decide
from rpcmp.job.restore_planner import RestorePlanner, Start
from rpcmp.job.server_calls import warnings
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.telemetry import VITALS_SECONDS, Vitals
from rpcmp.observability.events.definitions import (
    EvalEvent,
    FaultEvent,
    GenerationEvent,
    LogEvent,
    PlanEvent,
    RecoveredEvent,
    RunEvent,
    SharesEvent,
    StepEvent,
    SummaryEvent,
    WarningEvent,
)
from rpcmp.observability.events.event import Event, PlanOutcome, StageInfo, StagePlan
from rpcmp.observability.events.stream import EventStream
from rpcmp.pipelining.cost_model import Prediction
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks
from rpcmp.process.logging.records import Entry
from rpcmp.process.signals import count_stop_requests
from rpcmp.server.connection import versions


def run_event(config: Config, job_id: str, addresses: Sequence[str]) -> RunEvent:
    """Return the event `run`, which is reported before all others.

    Args:
        config: the job; its balance may still be "auto".
        job_id: unique for each run.
        addresses: of the stage servers, by worker; empty: they are to be started here, and the
            event `generation` says where they are then.
    """
    software = versions()
    places = list(addresses) or [""] * len(config.workers)
    return RunEvent(
        name=config.name,
        config=redacted(config.model_dump(mode="json")),
        versions={
            "rpcmp": software.rpcmp,
            "torch": software.torch,
            "python": software.python,
        },
        driver=platform.node(),
        pid=os.getpid(),
        job_id=job_id,
        graph={"stages": _stages(config)},
        workers=[
            {
                "label": worker.label,
                "stage": worker.stage,
                "stage_index": worker.stage_index,
                "replica": worker.replica,
                "address": address,
            }
            for worker, address in zip(config.workers, places, strict=True)
        ],
    )


def _stages(config: Config) -> list[StageInfo]:
    """The stages in the graph's order, which is that of the rows of a pipeline diagram."""
    graph, names = config.graph(), config.stage_names
    return [
        {
            "name": name,
            "index": names.index(name),
            "inputs": [str(reference) for reference in graph.inputs[name]],
            "replicas": config.stage(names.index(name)).num_replicas,
            "device": config.stage(names.index(name)).device,
            "schedule_row": row,
        }
        for row, name in enumerate(graph.stages)
    ]


class TrainingRun:
    """One run, as far as it has come.

    Args:
        config: the job.
        connect: addresses of running stage servers; see ServerPool.
        report: told of every event.
        start: whether to go on from the newest checkpoint.
        forks: where processes come from.

    Attributes:
        signals: those that have been received.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None,
        report: Callable[[Event], None],
        start: Start,
        forks: Forks,
    ) -> None:
        self._config, self._connect = config, connect
        self._events = EventStream(report, self._generation_now)
        self._report = self._events.emit
        self._start = start
        self._forks = forks
        self._fleet: ServerPool | None = None
        self._checkpoints: Checkpoints | None = None
        self._session: Generation | None = None
        self._training = False
        self._has_begun = False
        self._history = History()
        self._begun_at = 0
        self._steps_at_fault = 0
        self._first_fault: RpcmpError | None = None
        self._lost_at: float | None = None
        self._hosts: dict[str, str] = {}
        self._vitals = Vitals()
        self._removing: asyncio.Task[None] | None = None
        self.signals: list[int] = []

    @property
    def step(self) -> int:
        """The last step that was reported."""
        return self._events.step

    async def train(self, order: Message) -> SummaryEvent:
        """The whole run; returns its summary.

        Args:
            order: what the driver process is told.

        Raises:
            RpcmpError: why it did not come to its end.
        """
        resumes = self._start == "resume"
        given = shares_of_before(self._config) if resumes else self._config
        fleet = self._fleet = ServerPool(given, self._connect, self._report, self._forks)
        if resumes and (before := newest_in(given.checkpoint_folder, given.name)) is not None:
            fleet.run_folder = before.name
        self._report(run_event(given, fleet.job_id, fleet.addresses))
        telling = asyncio.create_task(self._tell_vitals())
        try:
            async with warnings(given, fleet.dialer.security, self._report):
                return await self._train(given, fleet, order)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _train(self, given: Config, fleet: ServerPool, order: Message) -> SummaryEvent:
        config, prediction = await balanced(given, self._connect, self._forks)
        for text in config.warnings:
            self._report(WarningEvent(text=text))
        if prediction is not None:
            self._report(_plan_event(prediction))
        if config.balance_replicas:
            self._report(SharesEvent(shares=config.shares))
        checkpoints = self._checkpoints = Checkpoints(config, fleet, self._report)
        beginning = RestorePlanner(config, fleet, checkpoints, self._report, self._start)
        if config.checkpoint is not None:
            await asyncio.to_thread(require_place, config.checkpoint_folder)
        await fleet.open()
        while True:
            self._vitals.begin()
            session = Generation(
                *(config, fleet, checkpoints.generation),
                choose=beginning.choose,
                vitals=self._vitals,
                log=self._report_log,
            )
            self._session = session
            try:
                summary = await self._generation(session, checkpoints, order)
            except RpcmpError as error:
                await self._recover(error, session, fleet, checkpoints)
                continue
            if prediction is not None:
                plan = _compare(prediction, self._events.step_seconds)
                summary = replace(summary, plan=plan)
            self._report(summary)
            return summary

    def interrupt(self, signum: int, task: asyncio.Future[SummaryEvent]) -> None:
        """The first signal while training ends the run after its step, any other at once."""
        before = count_stop_requests(self.signals)
        self.signals.append(signum)
        if count_stop_requests(self.signals) == before:
            return
        if not before and self._session is not None and self._training:
            self._session.send({"op": "finish_step", "save": self.saves_on(signum)})
        else:
            task.cancel()

    def saves_on(self, signum: int) -> bool:
        """Whether a signal saves: a Ctrl-C only where the config asks for checkpoints."""
        return signum != signal.SIGINT or self._config.checkpoint is not None

    async def leave(self) -> None:
        """End at once, with a checkpoint of what the servers hold."""
        if self._session is not None and self._checkpoints is not None:
            await self._session.close()
            await self._checkpoints.leave()

    async def close(self) -> None:
        """Free all servers."""
        if self._removing is not None:
            await asyncio.gather(self._removing, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._fleet is not None and self._checkpoints is not None:
            await self._fleet.free(self._checkpoints.generation)

    async def _tell_vitals(self) -> None:
        """Say how all processes are, whatever the training does."""
        await self._vitals.wait()
        while True:
            self._report(self._vitals.event(self.step))
            await asyncio.sleep(VITALS_SECONDS)

    def _report_log(self, entry: Entry) -> None:
        self._report(LogEvent.from_json(entry, complete=True))

    def _generation_now(self) -> int:
        return 1 if self._checkpoints is None else self._checkpoints.generation

    async def _generation(
        self, session: Generation, checkpoints: Checkpoints, order: Message
    ) -> SummaryEvent:
        """One generation to the end of the run; its summary."""
        await session.start()
        step = session.begin.step
        self._report(
            GenerationEvent(step=step, workers=session.worker_places, driver=session.driver_place)
        )
        if self._lost_at is not None:
            self._report(RecoveredEvent(step=step, seconds=time.monotonic() - self._lost_at))
            self._lost_at = None
            for reported in checkpoints.reported_up_to(step):
                self._events.emit_new(reported)
        else:
            self._events.step = step
        if not self._has_begun:
            self._begun_at = step
        self._has_begun = True
        checkpoints.remove_elsewhere = session.remove
        await checkpoints.remove_left_behind(ended_well=False)
        session.train({**order, "progress": checkpoints.progress_of(step)})
        self._training = True
        summary: SummaryEvent | None = None
        try:
            while not _is_done(event := await session.next_event()):
                if isinstance(event, SummaryEvent):
                    best = await asyncio.to_thread(checkpoints.best.kept)
                    summary = replace(event, best=best)
                else:
                    await self._handle(event, session, checkpoints)
                    checkpoints.require_saved(has_ended=False)
        finally:
            self._training = False
        if summary is None:
            raise JobError("the driver process has ended its run without a summary")
        await session.deliver()
        await session.wait_for_end()
        if self.signals:
            self._report(summary)
            raise InterruptedJobError(self.signals[0], self.step)
        try:
            checkpoints.require_saved(has_ended=True)
        except SavingError:
            self._report(summary)  # it was trained all the same
            raise
        if not summary.is_cut_short:
            await checkpoints.remove_left_behind(ended_well=True)
        if session.draining and summary.is_cut_short:
            raise DrainingError(
                f"the server of stage {session.draining!r} is being stopped; the job has paused "
                f"after step {self.step}"
            )
        return summary

    async def _handle(
        self, event: Event | Message, session: Generation, checkpoints: Checkpoints
    ) -> None:
        saved = None
        match event:
            case Event():
                self._events.emit_new(event)
            case {"event": "progress"}:
                saved = await checkpoints.note_progress(event)
            case {"event": "saved"}:
                saved = await checkpoints.note_saved(event["stage"], event["saved"])
            case {"event": "draining"}:
                session.send({"op": "finish_step", "save": True})
        if saved is not None:
            failed = saved != checkpoints.saved
            session.send({"op": "saved", "step": saved, "failed": failed})
            self._removing = asyncio.create_task(checkpoints.remove_surplus())

    async def _recover(
        self, error: RpcmpError, session: Generation, fleet: ServerPool, checkpoints: Checkpoints
    ) -> None:
        """Get ready for the next generation.

        Raises:
            RpcmpError: there will be none.
        """
        for event in await session.abandon():
            is_progress = isinstance(event, dict) and event["event"] == "progress"
            if is_progress or isinstance(event, StepEvent | EvalEvent):
                await self._handle(event, session, checkpoints)
        checkpoints.forget_parts()
        if isinstance(error, InterruptedJobError):  # the step has ended, and is saved if it has to
            raise error
        recovery = self._config.recovery
        if self.step > self._steps_at_fault:
            self._history = replace(self._history, restarts=0)
            self._first_fault = None
        self._steps_at_fault = self.step
        has_stepped = self.step > self._begun_at
        decision = decide(error, self._history, recovery.max_restarts, self._has_begun, has_stepped)
        self._history = decision.history
        try:
            if self.signals or not recovery.enabled or decision.error is not None:
                raise self._explained(decision.error or error)
            self._first_fault = self._first_fault or error
            self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
            self._hosts |= {label: place["host"] for label, place in session.worker_places.items()}
            self._hosts[DRIVER] = session.driver_place["host"]
            self._report(
                FaultEvent(
                    step=self.step,
                    error=str(error),
                    kind=type(error).__name__,
                    stage=error.stage,
                    host=self._hosts.get(error.stage, ""),
                )
            )
            self._vitals.lose(error.stage)
            self._report(self._vitals.event(self.step))
            session.let_go()
            await asyncio.sleep(decision.pause)
            await fleet.wait_until_ready()
        except RpcmpError:
            await checkpoints.leave()
            raise
        await session.close()
        checkpoints.generation += 1

    def _explained(self, error: RpcmpError) -> RpcmpError:
        """With the fault that it followed: why a recovery failed is not why there had to be one."""
        first = self._first_fault
        if first is not None and str(first) not in str(error):
            error.add_note(f"this followed a fault after step {self.step}: {first}")
        return error


def _is_done(event: Event | Message) -> bool:
    return isinstance(event, dict) and event["event"] == "done"


def _plan_event(prediction: Prediction) -> PlanEvent:
    stages: dict[str, StagePlan] = {
        name: {
            "num_layers": stage.num_layers,
            "busy_s": stage.busy_s,
            "bubble": stage.bubble,
            "memory_bytes": stage.memory_bytes,
            "limit_bytes": stage.limit_bytes,
        }
        for name, stage in prediction.stages.items()
    }
    return PlanEvent(
        balance=prediction.balance,
        step_s=prediction.step_s,
        bubble=prediction.bubble,
        stages=stages,
    )


def _compare(prediction: Prediction, step_seconds: Sequence[float]) -> PlanOutcome:
    """The median leaves out the first step, which warms up."""
    counted = step_seconds[1:] or step_seconds
    return {
        "balance": prediction.balance,
        "predicted_step_s": prediction.step_s,
        "measured_step_s": statistics.median(counted) if counted else None,
    }
