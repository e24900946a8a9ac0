"""The first failure ends a generation, wherever it happens and whatever waits at that moment.

`FirstFailure` keeps it, and `Watchdog` finds the failure that raises nothing: every process is
alive, but nothing moves, as with a lock that is never released or a loader that waits for a disk
forever. A slow step is not a hang: some stage starts an action every now and then.

How each failure is noticed, and after how long:

    user's code has raised         at once                       worker/backward.py
    a device has failed            at its next call              worker/failure.py
    a process has died             at once                       process/child.py
    a process is stopped           2 s, a look at its state      process/activity.py
    a process is stuck             `recovery.heartbeat_timeout`  process/activity.py
    a server's host has vanished   7 s, gRPC's keepalive         server/connection.py
    a connection is silent         6 s, TCP's user timeout       process/sockets.py
    all live and nothing moves     `recovery.watchdog`           `Watchdog`
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rpcmp.errors import JobError, RpcmpError, WorkerHungError, one_line
from rpcmp.process.activity import Doing
from rpcmp.v1 import control_pb2 as pb

Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises its first error instead of a group of errors."""
    first: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except* Exception as errors:
        first = errors.exceptions[0]
    if first is not None:
        raise first


class FirstFailure:
    """The failure of a generation, if there is one, and the tasks that may detect it."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: RpcmpError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ignoring = False

    def fail(self, error: RpcmpError) -> None:
        """Record a failure; only the first one counts."""
        if not self._ignoring and not self._future.done():
            self._error = error
            self._future.set_exception(error)
            self._future.exception()  # mark it as retrieved: perhaps nothing waits just now

    def ignore(self) -> None:
        """Ignore failures: the generation is ending, and connections may well break."""
        self._ignoring = True

    def supervise(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background; an error that it raises is a failure."""
        task = asyncio.create_task(self._supervise(coroutine))
        self._tasks.append(task)
        return task

    async def unless_failed(self, awaitable: Awaitable[Result]) -> Result:
        task = asyncio.ensure_future(awaitable)
        try:
            futures: list[asyncio.Future[Any]] = [task, self._future]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # a result that came at the same moment is not lost
                self._future.result()
            return await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RpcmpError):
                await task

    async def reason(self, timeout: float | None = None) -> RpcmpError | None:
        await asyncio.wait([self._future], timeout=timeout)
        return self._error

    async def close(self) -> None:
        self.ignore()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._future.cancel()

    async def _supervise(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except RpcmpError as error:
            self.fail(error)
        except Exception as error:
            self.fail(JobError(f"supervising the job failed: {one_line(error)}"))
            raise


COLLECTIVE_PHASES = ("join", "sum")
"""Phases that end when all stages have reached them: a stage in one may wait for a hung stage."""


class Watchdog:
    """Watches the driver's progress, and inspects the stages if there is none.

    Args:
        timeout: seconds without any progress that count as a hang; 0: none do.
        inspect: returns what each worker does; see WorkerGroup.
    """

    def __init__(
        self, timeout: float, inspect: Callable[[], Awaitable[dict[str, pb.InspectResponse]]]
    ) -> None:
        self._timeout = timeout
        self._inspect = inspect
        self._moved_at = time.monotonic()
        self._driver: Doing | None = None

    def update_driver(self, doing: Doing) -> None:
        """Record what the driver process does; it is not stuck if it waits for this process."""
        if self._driver is None or self._driver[:3] != doing[:3] or not doing.phase:
            self._moved_at = time.monotonic()
        self._driver = doing

    async def run(self) -> None:
        """Watch until nothing moves any more; raises WorkerHungError for the stuck process."""
        while True:
            left = self._moved_at + (self._timeout or float("inf")) - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, 3600.0))
                continue
            workers = await self._inspect()
            youngest = min((worker.doing.seconds for worker in workers.values()), default=0.0)
            if youngest >= self._timeout:
                raise _hung_process(self._driver, workers)
            self._moved_at = time.monotonic() - youngest


def _hung_process(driver: Doing | None, workers: dict[str, pb.InspectResponse]) -> WorkerHungError:
    """Name the stage that has been in one action for the longest time, or else the driver.

    A stage in an action of its own comes before those that may wait for it.
    """
    busy = {stage: worker for stage, worker in workers.items() if worker.doing.phase}
    stage, worker = max(
        busy.items(),
        key=lambda item: (item[1].doing.phase not in COLLECTIVE_PHASES, item[1].doing.seconds),
        default=("driver", pb.InspectResponse(doing=driver and pb.Doing(**driver._asdict()))),
    )
    doing = worker.doing
    return WorkerHungError(
        stage,
        worker.host,
        0,
        doing.phase,
        doing.step,
        doing.microbatch,
        doing.seconds,
        worker.stacks,
    )
