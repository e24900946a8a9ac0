"""Training as the workload of a job's generations: from the driver's order to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from rpcmp.checkpoint.slots import MIRRORED_BY_ALL
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import (
    DrainingError,
    InterruptedJobError,
    JobError,
    RpcmpError,
)
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.cuts import HeldStep
from rpcmp.job.driver_record import DriverRecord, held_seconds
from rpcmp.job.generation import Generation
from rpcmp.job.membership import Membership
from rpcmp.job.moving_balance import Change, MovingBalance
from rpcmp.job.output_files import OutputFiles
from rpcmp.job.recovery import PausedError, Progress, Workload
from rpcmp.job.restore_point import RestorePlanner, Start
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.stage_events import stages_event
from rpcmp.job.takeover import LostJob
from rpcmp.job.vitals import Vitals
from rpcmp.observability.events import (
    EvalEvent,
    Event,
    FaultEvent,
    GenerationEvent,
    LogEvent,
    RecoveredEvent,
    ScheduleEvent,
    StepEvent,
    SummaryEvent,
)
from rpcmp.observability.events.training_events import EventStream
from rpcmp.pipelining.partition import StageHost
from rpcmp.process.channel import Message

COPY_SECONDS = 20.0
"""How long to wait until other servers hold the last step of one that leaves."""

POLL_SECONDS = 0.1

OF_STEPS = StepEvent, EvalEvent, ScheduleEvent
"""Events that matter though their generation has been abandoned."""


class TrainingWorkload(Workload[SummaryEvent]):
    """Trains a job; the result is the summary event.

    Args:
        signals: those that have been received; grows.
        lost: the run to go on with, whose driver was lost; None: there is none.
        identity: see rpcmp.job.takeover.identity_of.
        hosts: of the stages, if the layers were measured there.

    Attributes:
        is_training: whether the driver process trains just now.
        has_begun: whether any group of this run has ever been formed.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        events: EventStream,
        vitals: Vitals,
        start: Start,
        order: Message,
        signals: Sequence[int],
        lost: LostJob | None = None,
        identity: str = "",
        hosts: Sequence[StageHost] = (),
    ) -> None:
        self._pool = pool
        self._config = config
        self._events = events
        self._report = events.emit
        self._vitals = vitals
        self._order = order
        self._signals = signals
        self._identity = identity
        self.checkpoints = Checkpoints(config, pool, events.emit)
        if lost is not None:
            self.checkpoints.generation = lost.generation + 1
        self._balance = MovingBalance(config, events.emit, hosts)
        self._membership = Membership(self._balance, pool, events.emit)
        pool.can_do_without = self._can_do_without
        self._leaving = ""
        self._told_stages = config.stage_names
        self._planner = RestorePlanner(config, pool, self.checkpoints, events.emit, start, lost)
        records = config.recovery.enabled and not pool.is_local  # own servers end with the driver
        run, number = (config.name, pool.job_id, pool.driver_id), 0 if lost is None else lost.number
        self._record = DriverRecord(*run, pool.dialer.security, number) if records else None
        self.is_training = self._is_finishing = False
        self._generation: Generation | None = None
        self.has_begun = False
        self._formed = 0  # the newest generation that was
        self._first_step = 0
        self._step_at_fault = 0
        self._first_fault: RpcmpError | None = None
        self._lost_at: float | None = None
        self._hosts: dict[str, str] = {}
        self._removal: asyncio.Task[None] | None = None

    @property
    def held_seconds(self) -> float:
        """Seconds for which the servers hold the newest steps if the driver is lost."""
        return held_seconds(self._config, self._record)

    def finish_step(self, save: bool) -> None:
        """Let the driver process stop after its running step, and save it if `save`."""
        self._is_finishing = True
        if self._generation is not None:
            self._generation.send({"op": "finish_step", "save": save})

    def rebalance(self, balance: list[int], reason: str) -> None:
        """Go on after the running step with these numbers of layers per stage, if it trains."""
        self._change_to(Change(self._balance.config.with_balance(balance), reason))

    def _change_to(self, change: Change) -> None:
        if self._may_pause and self._generation is not None:
            self._balance.want(change)
            self._generation.send({"op": "pause"})

    @property
    def _may_pause(self) -> bool:
        return self.is_training and not (self._is_finishing or self._leaving)

    async def _take_in(self, address: str) -> None:
        """Go on with another host after a step, if it can serve a stage."""
        await self._membership.examine(address)
        self._change_to_newcomers()

    def _change_to_newcomers(self) -> None:
        if not self._may_pause or self._balance.is_changing:
            return  # this is called again once the next generation trains
        if (change := self._membership.with_newcomers()) is not None:
            self._change_to(change)

    def _let_leave(self, stage: str) -> None:
        """Go on without a host after the running step; with a spare, if there is one.

        Another one that leaves at the same time may be the only one that holds its state: then the
        step is saved, as for any server that is drained.
        """
        self._pool.leaving.add(self._pool.place(stage).address)
        is_first = not self._leaving and self._membership.can_do_without([stage])
        if is_first and self._generation is not None:
            self._leaving = stage
            self._generation.send({"op": "pause"})
        elif stage != self._leaving:
            self.finish_step(save=True)

    async def _can_do_without(self, stages: Sequence[str]) -> bool:
        """Return whether the servers of the other stages can go on, and hold all that it takes."""
        if not self._membership.can_do_without(stages):
            return False
        held = await self._held_without(stages)
        # A neighbour holds the snapshot before the last one, at least.
        oldest = self._events.step - 2 * max(1, self._config.snapshot_every_steps)
        return held is not None and held.common.step >= oldest

    async def _held_without(self, stages: Sequence[str]) -> HeldStep | None:
        """Return the newest step that the servers of the other stages hold."""
        holdings = await self._pool.holdings()
        return self.checkpoints.newest_held(
            {label: held for label, held in holdings.items() if label not in stages}
        )

    def interruption(self, signum: int) -> InterruptedJobError:
        """Return the error of a run that a signal has ended."""
        step, saved = self._events.step, self.checkpoints.saved
        error = InterruptedJobError(signum, step)
        if self._config.checkpoint is None and saved <= self._first_step < step:
            lost = f"nothing after step {saved}" if saved else "nothing"
            error.add_note(
                f"{lost} was saved: add a [checkpoint] section to the config, and a run that a "
                "signal stops saves its last step"
            )
        return error

    @property
    def has_moved(self) -> bool:
        """Whether layers have ever moved between the stages."""
        return self._balance.num_changes > 0

    async def wait_for_removal(self) -> None:
        if self._removal is not None:
            await asyncio.gather(self._removal, return_exceptions=True)

    def next_generation(self) -> Generation:
        if self._generation is not None:
            self.checkpoints.generation += 1
        self._is_finishing = False  # a drain may have been followed by a fault, and a spare
        self._leaving = ""
        if left := list(self._pool.left):
            self._balance.change(self._membership.without(left), self._events.step)
        self._use_stages()
        self._vitals.start_generation()
        self._generation = Generation(
            self._balance.config,
            self._pool,
            self.checkpoints.generation,
            choose=self._planner.choose,
            vitals=self._vitals,
            log=lambda entry: self._report(LogEvent.from_entry(entry)),
            record=self._record,
        )
        return self._generation

    def _use_stages(self) -> None:
        """Let all know which stages there are from now on."""
        config = self._balance.config
        self._pool.use(config)
        self.checkpoints.workers = config.workers
        self._vitals.keep([worker.label for worker in config.workers])

    async def run(self, generation: Generation) -> SummaryEvent:
        began = time.monotonic()
        await generation.start()
        self._balance.start(self.checkpoints.layers, time.monotonic() - began)
        step = generation.restore_point.step
        self._report_start(generation, step)
        self.has_begun, self._formed = True, generation.number
        self._begin_record()
        self.checkpoints.remove_elsewhere = generation.workers.remove_checkpoint
        await self.checkpoints.remove_left_behind(ended_well=False)
        outputs = OutputFiles(generation.driver_scratch)
        progress = self.checkpoints.progress_of(step)
        options = progress.get("options", []) if progress else self._order["options"]
        if self._balance.leaves_options:
            own = self._config.options.model_dump()
            options = [own, *(each for each in options if each != own)]
        # More than one change may have come together in a generation.
        restarts = max(0, generation.number - 1 - self._balance.num_changes)
        changing = {"progress": progress, "options": options, "restarts": restarts}
        order = {**self._order, **changing}
        generation.send(outputs.redirect(order))
        summary = await self._train(generation)
        await asyncio.to_thread(outputs.deliver)
        await generation.wait_for_end()
        try:
            if self._signals:
                raise self.interruption(self._signals[0])
            self.checkpoints.require_saved(has_ended=True)
        except RpcmpError:
            self._report(summary)  # the training itself is complete, or its last step
            raise
        if not summary.is_cut_short:
            if self._record is not None:
                await self._record.end(summary, self._identity)
            await self.checkpoints.remove_left_behind(ended_well=True)
        if generation.draining and summary.is_cut_short:
            raise DrainingError(
                f"the server of stage {generation.draining!r} is being stopped; the job has paused "
                f"after step {self._events.step}"
            )
        return summary

    def _report_start(self, generation: Generation, step: int) -> None:
        """Report the group, and the steps up to the restored one that were not reported before."""
        workers, driver = generation.workers.places, generation.driver_place
        if (names := self._balance.config.stage_names) != self._told_stages:
            self._told_stages = names
            self._report(stages_event(self._balance.config, self._pool.places, step))
        self._report(GenerationEvent(step=step, workers=workers, driver=driver))
        if self._lost_at is not None:
            self._report(RecoveredEvent(step=step, seconds=time.monotonic() - self._lost_at))
            self._lost_at = None
            for event in self.checkpoints.step_events_up_to(step):
                self._events.emit_new(event)
        elif not self.has_begun:  # later, a pause may be followed by an earlier step
            self._events.step = step
        if not self.has_begun:
            self._first_step = self._step_at_fault = step

    async def _train(self, generation: Generation) -> SummaryEvent:
        self.is_training = True
        for address in list(self._membership.requests):  # of the generation before
            generation.failure.supervise(self._take_in(address))
        self._change_to_newcomers()
        summary: SummaryEvent | None = None
        try:
            while not _is_message("done", event := await generation.next_event()):
                if isinstance(event, SummaryEvent):
                    best = await asyncio.to_thread(self.checkpoints.best)
                    summary = replace(event, best=best)
                else:
                    await self._handle(event, generation)
                    self.checkpoints.require_saved(has_ended=False)
        finally:
            self.is_training = False
        if summary is None:
            raise JobError("the driver process has ended its run without a summary")
        return summary

    async def _handle(self, event: Event | Message, generation: Generation) -> None:
        completed = None
        match event:
            case Event():
                self._events.emit_new(event)
                if isinstance(event, StepEvent):
                    self._dismiss_departed(event.step, generation)
                if (proposal := self._balance.add(event)) is not None:
                    self.rebalance(proposal.balance, proposal.reason)
            case {"event": "paused"} if not self._is_finishing:  # else it ends instead
                await self._pause()
            case {"event": "progress"}:
                completed = await self.checkpoints.add_progress(event)
                self._record_step(event["step"])
            case {"event": "saved"}:
                completed = await self.checkpoints.add_part(event["stage"], event["saved"])
            case {"event": "draining", "stage": stage, "leaves": True}:
                self._let_leave(stage)
            case {"event": "draining"}:
                self.finish_step(save=True)
            case {"event": "joining", "address": address}:
                if self._membership.request(address):
                    generation.failure.supervise(self._take_in(address))
        if completed is not None:
            failed = completed != self.checkpoints.saved
            generation.send({"op": "saved", "step": completed, "failed": failed})
            self._removal = asyncio.create_task(self.checkpoints.remove_surplus())

    async def _pause(self) -> None:
        """End the generation, for one with another balance or other stages."""
        self.is_training = False
        step = self._events.step
        if (change := self._balance.take_wanted(step)) is not None:
            self._membership.forget(change.joined)
        self.checkpoints.forget_parts()
        await self.wait_for_removal()  # on other machines it takes this group's clients
        if self._leaving and self._generation is not None:
            await self._wait_for_copies(step)
            self._generation.workers.release_draining()
            await self._pool.wait_until_ready()  # a spare takes the stage, or the others do
        raise PausedError

    async def _wait_for_copies(self, step: int) -> None:
        """Wait for a moment until other servers hold the last step of a server that leaves.

        Otherwise the run goes on from the step before.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COPY_SECONDS):
                while True:
                    held = await self._held_without([self._leaving])
                    if held is not None and held.common.step >= step:
                        return
                    await asyncio.sleep(POLL_SECONDS)

    def _dismiss_departed(self, step: int, generation: Generation) -> None:
        """Let servers go that have left, once others hold all that the group goes on from."""
        count = step - generation.restore_point.step
        needed = MIRRORED_BY_ALL * max(1, self._config.snapshot_every_steps)
        if self._pool.has_departed and count > needed:
            generation.failure.supervise(self._pool.dismiss_departed(generation.number))

    def _begin_record(self) -> None:
        if self._record is not None:
            self._record.about = self.checkpoints.about().model_dump_json()
            for step in self.checkpoints.known_steps():
                self._record_step(step)

    def _record_step(self, step: int) -> None:
        if self._record is not None:
            first = min(self.checkpoints.known_steps())
            self._record.add(self.checkpoints.driver_state(step), first)

    async def settle(
        self, error: RpcmpError, generation: Generation, unread: list[Event | Message]
    ) -> Progress:
        for event in unread:
            if _is_message("progress", event) or isinstance(event, OF_STEPS):
                await self._handle(event, generation)
        self.keep(unread)
        self.checkpoints.forget_parts()
        if isinstance(error, InterruptedJobError):
            raise error  # the step is complete, and saved if it has to be
        step = self._events.step
        is_new, self._step_at_fault = step > self._step_at_fault, step
        before = self._balance.config.stage_names
        goes_back = self._balance.go_back(error, is_repeated=not is_new)
        if not goes_back and not is_new and generation.number == self._formed:
            goes_back = self._balance.leave_options(error)
        if undone := [name for name in before if name not in self._balance.config.stage_names]:
            self._membership.undone(undone)
            await self._pool.dismiss(undone, generation.number)
        self._use_stages()
        if is_new:
            self._first_fault = None
        interruption = None
        if self._signals:
            interruption = InterruptedJobError(self._signals[0], step)
            interruption.add_note(f"it could not end in good order: {error}")
        return Progress(is_new, self.has_begun, step > self._first_step, interruption, goes_back)

    def keep(self, unread: list[Event | Message]) -> None:
        for event in unread:
            match event:
                case {"event": "joining", "address": address}:
                    self._membership.request(address)
                case {"event": "draining", "stage": stage, "leaves": True}:
                    self._pool.leaving.add(self._pool.place(stage).address)

    def report_fault(self, error: RpcmpError, generation: Generation) -> None:
        self._first_fault = self._first_fault or error
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        self._hosts |= {label: place["host"] for label, place in generation.workers.places.items()}
        self._hosts[DRIVER] = generation.driver_place["host"]
        self._report(
            FaultEvent(
                step=self._events.step,
                error=str(error),
                kind=type(error).__name__,
                stage=error.stage,
                host=self._hosts.get(error.stage, ""),
            )
        )
        self._vitals.mark_lost(error.stage)
        self._report(self._vitals.event(self._events.step))

    def explain(self, error: RpcmpError) -> RpcmpError:
        # Why a recovery failed is not why there had to be one.
        first = self._first_fault
        if first is not None and str(first) not in str(error):
            error.add_note(f"this followed a fault after step {self._events.step}: {first}")
        return error

    async def give_up(self, generation: Generation) -> None:
        await self.checkpoints.leave()


def _is_message(name: str, event: Event | Message) -> bool:
    return isinstance(event, dict) and event["event"] == name
