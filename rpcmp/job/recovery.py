"""Recovery: what follows a fault, and the loop that forms one generation after another.

a worker, a host or a link is lost           ──> recover, until it no longer helps
the user's code raised                       ──> recover once: a replay tells bad luck from a bug
the same place raised again after a replay   ──> fail
the config, a version, a factory is wrong    ──> fail

    form a generation ──> workload runs ──> result
         ↑↑                     │ fault
         │└─ it asks for that   │
         │              abandon the generation, decide ──> fail
         └── pause, wait until servers are ready ──┘

`decide` is pure. A run that trains and a pipeline that serves its program's calls are two workloads
of the same loop. A lost server is restarted or replaced in `server_pool`; a lost worker is replaced
by its server when the next generation claims it, in `worker_group`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rpcmp.config.run_sections import RecoveryConfig
from rpcmp.errors import (
    ConfigError,
    DeviceLostError,
    InterruptedJobError,
    JobError,
    LossScaleError,
    NonFiniteLossError,
    RecoveryTimeoutError,
    RpcmpError,
    SavingError,
    StageConfigError,
    StageError,
    TakenOverError,
    UnavailableError,
    WorkerDiedError,
    WorkerHungError,
)
from rpcmp.job.generation import Generation
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import Event
from rpcmp.process.channel import Message

LONGEST_PAUSE = 10.0

Location = tuple[object, ...]
"""Where the user's code raised."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class FaultHistory:
    """The faults since the last new step.

    Attributes:
        restarts: how often the group was formed again without a new step.
        raised: where the user's code has raised and was replayed.
    """

    restarts: int = 0
    raised: frozenset[Location] = frozenset()


@dataclass(frozen=True)
class Decision:
    """The reaction to a fault: recover after `pause` seconds, or fail with `error`.

    Attributes:
        history: the faults so far, including this one.
    """

    error: RpcmpError | None
    pause: float
    history: FaultHistory


def decide(
    error: RpcmpError,
    history: FaultHistory,
    max_restarts: int,
    has_begun: bool,
    has_stepped: bool = True,
    is_local: bool = False,
) -> Decision:
    """Decide what to do after a fault.

    Args:
        max_restarts: how often to try without a new step in between.
        has_begun: whether any group of this run has ever been formed.
        has_stepped: whether the run has done a step since it was started or resumed.
        is_local: whether the run has started its servers itself.
    """
    where = location(error)
    if where in history.raised or not is_recoverable(error, has_begun, has_stepped, is_local):
        return Decision(error, 0.0, history)
    if history.restarts >= max_restarts:
        exhausted = RecoveryTimeoutError(
            f"gave up after {history.restarts} restarts without a new step; the last: {error}"
        )
        return Decision(exhausted, 0.0, history)
    pause = min(2.0 ** min(history.restarts - 1, 10), LONGEST_PAUSE) if history.restarts else 0.0
    raised = history.raised if where is None else history.raised | {where}
    return Decision(None, pause, FaultHistory(history.restarts + 1, raised))


def is_recoverable(
    error: RpcmpError, has_begun: bool, has_stepped: bool = True, is_local: bool = False
) -> bool:
    """Return whether another try may succeed; for the arguments see `decide`.

    Before the first group was formed, only a lost process is tried again, or one of our own servers
    that a very busy machine has kept from answering: the user has to mend another one that cannot
    be reached, or a model that cannot be built. The same holds for what the user's code raises in
    the first step after the run was started or resumed.
    """
    if isinstance(error, ConfigError | RecoveryTimeoutError | InterruptedJobError | SavingError):
        return False
    if isinstance(error, WorkerDiedError | WorkerHungError | DeviceLostError):
        return True
    if isinstance(error, UnavailableError):
        return has_begun or is_local
    if isinstance(error, StageConfigError) and error.phase != "build":
        return False
    if isinstance(error, StageError):
        return has_stepped if has_begun else error.phase != "build"
    if isinstance(error, NonFiniteLossError):
        return has_stepped or not has_begun
    return isinstance(error, JobError)


def location(error: RpcmpError) -> Location | None:
    """Return where in the run the user's code raised; None if the fault is not in that code."""
    match error:
        case WorkerDiedError() | WorkerHungError() | DeviceLostError():
            return None
        case StageError():
            return ("stage", error.stage, error.phase, error.step, error.microbatch)
        case NonFiniteLossError():
            return ("loss", error.step, error.microbatch)
        case LossScaleError():
            return ("loss scale", error.step)
        case JobError():
            return ("driver", str(error).partition("\n")[0])
    return None


@dataclass(frozen=True)
class Progress:
    """The progress of a run when a generation failed; see `decide`.

    Attributes:
        goes_back: whether the generation was an attempt that the next one undoes: whatever its
            fault was, it is tried without.
        is_new: whether it has come further than at the fault before.
        interruption: the error to end with if a signal asks the run to stop.
    """

    is_new: bool
    has_begun: bool = True
    has_stepped: bool = True
    interruption: RpcmpError | None = None
    goes_back: bool = False


class PausedError(Exception):
    """Raised by a workload that has paused, to go on in another generation."""


class Workload(ABC, Generic[Result]):
    """The work of a job's generations: to train to the end, or to serve calls."""

    @abstractmethod
    def next_generation(self) -> Generation:
        """Return the next generation, which has not been started."""

    @abstractmethod
    async def run(self, generation: Generation) -> Result:
        """Start a generation and let it do its work."""

    @abstractmethod
    async def settle(
        self, error: RpcmpError, generation: Generation, unread: list[Event | Message]
    ) -> Progress:
        """Account for a generation that was abandoned, with the events that `run` has not read.

        Raises `error` if the run ends here without anything to give up.
        """

    @abstractmethod
    async def give_up(self, generation: Generation) -> None:
        """Save what can be saved: there will not be another generation."""

    def report_fault(self, error: RpcmpError, generation: Generation) -> None:
        """Report a fault that the run recovers from."""

    def keep(self, unread: list[Event | Message]) -> None:
        """Keep what matters of the events of a generation that has paused, and was not read."""

    def explain(self, error: RpcmpError) -> RpcmpError:
        """Return the error that the run fails with, with notes on the faults before it."""
        return error


class RecoveryLoop(Generic[Result]):
    """Runs a workload over as many generations as it takes.

    Attributes:
        generation: the newest one; None before the first.
    """

    def __init__(
        self, recovery: RecoveryConfig, pool: ServerPool, workload: Workload[Result]
    ) -> None:
        self._recovery = recovery
        self._pool = pool
        self._workload = workload
        self._history = FaultHistory()
        self.generation: Generation | None = None

    async def run(self) -> Result:
        while True:
            try:
                return await self.attempt()
            except PausedError:
                if self.generation is not None:
                    self._workload.keep(await self.generation.close())
            except RpcmpError as error:
                await self.recover(error)

    async def attempt(self) -> Result:
        """Run the workload in the next generation, without recovery."""
        self.generation = self._workload.next_generation()
        return await self._workload.run(self.generation)

    async def recover(self, error: RpcmpError) -> None:
        """End the generation that failed and return when the servers are ready for the next."""
        if (generation := self.generation) is None:
            raise AssertionError("only a generation can fail")
        if isinstance(error, TakenOverError):  # what the servers hold is another driver's now
            raise error
        unread = await generation.abandon()
        progress = await self._workload.settle(error, generation, unread)
        if progress.is_new:
            self._history = replace(self._history, restarts=0)
        decision = Decision(None, 0.0, self._history)
        if not progress.goes_back:
            decision = decide(
                *(error, self._history, self._recovery.max_restarts),
                *(progress.has_begun, progress.has_stepped, self._pool.is_local),
            )
        self._history = decision.history
        final = decision.error or progress.interruption
        try:
            if final is not None or not self._recovery.enabled:
                raise self._workload.explain(final or error)
            self._workload.report_fault(error, generation)
            generation.workers.release_draining()
            await asyncio.sleep(decision.pause)
            await self._pool.wait_until_ready()
        except RpcmpError:
            await self._workload.give_up(generation)
            raise
        # Only now: until here the servers stay claimed, so that no other job takes them.
        self._workload.keep(await generation.close())

    async def close(self) -> None:
        if self.generation is not None:
            await self.generation.close()
