"""The loop that forms one generation after another, with fakes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from rpcmp.config.run_sections import RecoveryConfig
from rpcmp.errors import (
    ConfigError,
    InterruptedJobError,
    RecoveryTimeoutError,
    RpcmpError,
    TakenOverError,
    WorkerDiedError,
)
from rpcmp.job.generation import Generation
from rpcmp.job.recovery import PausedError, Progress, RecoveryLoop, Workload
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import Event
from rpcmp.process.channel import Message

RECOVERY = ["abandon", "settle", "report fault", "release", "wait for servers", "close"]
"""The steps from a fault to the next generation."""


class FakeGeneration:
    """A generation that only records its calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.workers = self

    async def abandon(self) -> list[Event | Message]:
        self._log.append("abandon")
        return []

    def release_draining(self) -> None:
        self._log.append("release")

    async def close(self) -> list[Event | Message]:
        self._log.append("close")
        return [{"event": "joining", "address": "told meanwhile"}]


@dataclass
class FakePool:
    """Servers that are ready at once, or raise an error."""

    log: list[str]
    error: RpcmpError | None = None
    is_local: bool = False

    async def wait_until_ready(self) -> None:
        self.log.append("wait for servers")
        if self.error is not None:
            raise self.error


@dataclass
class FakeWorkload(Workload[str]):
    """Raises one fault per generation and then returns."""

    faults: list[RpcmpError | PausedError]
    progress: Progress = field(default_factory=lambda: Progress(is_new=False))
    log: list[str] = field(default_factory=list)
    kept: list[Event | Message] = field(default_factory=list)

    def next_generation(self) -> Generation:
        return cast(Generation, FakeGeneration(self.log))

    async def run(self, generation: Generation) -> str:
        self.log.append("run")
        if self.faults:
            raise self.faults.pop(0)
        return "done"

    async def settle(
        self, error: RpcmpError, generation: Generation, unread: list[Event | Message]
    ) -> Progress:
        self.log.append("settle")
        if isinstance(error, InterruptedJobError):
            raise error
        return self.progress

    def keep(self, unread: list[Event | Message]) -> None:
        self.kept += unread

    def report_fault(self, error: RpcmpError, generation: Generation) -> None:
        self.log.append("report fault")

    async def give_up(self, generation: Generation) -> None:
        self.log.append("give up")


def lost(count: int = 1) -> list[RpcmpError | PausedError]:
    return [WorkerDiedError(f"worker {number} died") for number in range(count)]


def run(
    workload: FakeWorkload, error: RpcmpError | None = None, enabled: bool = True
) -> RecoveryLoop[str]:
    """Run a loop to its end."""
    recovery = RecoveryConfig(enabled=enabled, max_restarts=2)
    pool = cast(ServerPool, FakePool(workload.log, error))
    loop = RecoveryLoop(recovery, pool, workload)
    assert asyncio.run(loop.run()) == "done"
    return loop


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.job.recovery.LONGEST_PAUSE", 0.0)


@pytest.mark.parametrize("faults", [0, 1, 2])
def test_each_generation_closes_only_when_the_servers_are_ready_for_the_next(faults: int) -> None:
    workload = FakeWorkload(lost(faults))
    run(workload)
    assert workload.log == [*["run", *RECOVERY] * faults, "run"]


@pytest.mark.parametrize("why", [WorkerDiedError("died"), PausedError()])
def test_what_servers_tell_while_a_generation_ends_is_kept(why: RpcmpError | PausedError) -> None:
    """A host may ask to join while the run waits for another one."""
    workload = FakeWorkload([why])
    run(workload)
    assert workload.kept == [{"event": "joining", "address": "told meanwhile"}]


def test_restarts_without_progress_are_limited_and_progress_resets_them() -> None:
    workload = FakeWorkload(lost(3))
    with pytest.raises(RecoveryTimeoutError, match="gave up after 2 restarts"):
        run(workload)
    assert workload.log[-3:] == ["abandon", "settle", "give up"]
    run(FakeWorkload(lost(9), Progress(is_new=True)))


@pytest.mark.parametrize(
    ("fault", "enabled"),
    [(ConfigError("wrong"), True), (WorkerDiedError("died"), False)],
)
def test_a_final_fault_saves_what_it_can_and_is_raised(fault: RpcmpError, enabled: bool) -> None:
    workload = FakeWorkload([fault])
    with pytest.raises(type(fault)) as raised:
        run(workload, enabled=enabled)
    assert raised.value is fault
    assert workload.log == ["run", "abandon", "settle", "give up"]


@pytest.mark.parametrize("fault", [WorkerDiedError("died"), ConfigError("wrong")])
def test_a_fault_of_a_run_that_has_to_stop_ends_it_as_the_signal_would(fault: RpcmpError) -> None:
    """Unless the fault would have ended it anyway."""
    signalled = InterruptedJobError(15, 3)
    workload = FakeWorkload([fault], Progress(is_new=False, interruption=signalled))
    with pytest.raises(RpcmpError) as raised:
        run(workload)
    assert raised.value is (signalled if isinstance(fault, WorkerDiedError) else fault)
    assert workload.log == ["run", "abandon", "settle", "give up"]


def test_a_workload_that_has_paused_goes_on_in_the_next_generation() -> None:
    workload = FakeWorkload([PausedError(), PausedError()])
    run(workload)
    assert workload.log == ["run", "close", "run", "close", "run"]


def test_whatever_fails_in_an_attempt_is_tried_without_it() -> None:
    workload = FakeWorkload([ConfigError("wrong")] * 5, Progress(is_new=False, goes_back=True))
    run(workload)
    assert workload.log == [*["run", *RECOVERY] * 5, "run"]


def test_a_driver_whose_job_is_another_ones_touches_nothing_any_more() -> None:
    workload = FakeWorkload([TakenOverError("another driver has it")])
    with pytest.raises(TakenOverError):
        run(workload)
    assert workload.log == ["run"]


def test_an_interrupted_run_is_abandoned_without_giving_up() -> None:
    workload = FakeWorkload([InterruptedJobError(2, 3)])
    with pytest.raises(InterruptedJobError):
        run(workload)
    assert workload.log == ["run", "abandon", "settle"]


def test_servers_that_do_not_come_back_end_the_run() -> None:
    workload = FakeWorkload(lost())
    with pytest.raises(RecoveryTimeoutError, match="did not come back"):
        run(workload, RecoveryTimeoutError("it did not come back"))
    assert workload.log[-2:] == ["wait for servers", "give up"]


def test_a_run_that_is_cancelled_while_it_recovers_can_be_closed() -> None:
    async def cancel(workload: FakeWorkload) -> None:
        is_waiting = asyncio.Event()

        class Slow(FakePool):
            async def wait_until_ready(self) -> None:
                await super().wait_until_ready()
                is_waiting.set()
                await asyncio.Event().wait()

        loop = RecoveryLoop(RecoveryConfig(), cast(ServerPool, Slow(workload.log)), workload)
        task = asyncio.create_task(loop.run())
        await is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop.close()

    workload = FakeWorkload(lost())
    asyncio.run(cancel(workload))
    assert workload.log == ["run", *RECOVERY]  # "close" comes after "wait for servers"
