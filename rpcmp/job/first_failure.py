"""The first error ends the job, wherever it comes from and whoever waits for whatever.

What hangs when nothing moves, though every process is alive: a lock that nobody frees, a loader
that waits for a disk for ever. A slow step is none of that: some stage begins an action now and
then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rpcmp.errors import JobError, RpcmpError, WorkerHungError, one_line
from rpcmp.process.activity import Doing
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.job.worker_group import WorkerGroup


Result = TypeVar("Result")


class FirstFailure:
    """Why a job has failed, if it has; and the tasks that may find out."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._ignoring = False

    def fail(self, error: RpcmpError) -> None:
        """Note that the job has failed; only the first time counts."""
        if not self._ignoring and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # seen: nobody may be waiting just now

    def ignore(self) -> None:
        """From now on the job is ending, and connections may well break."""
        self._ignoring = True

    def follow(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside everything else; what it raises fails the job."""
        task = asyncio.create_task(self._follow(coroutine))
        self._tasks.append(task)
        return task

    def when_failed(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `function` as soon as the job has failed."""

        def failed(future: asyncio.Future[None]) -> None:
            if not future.cancelled():
                self.follow(function())

        self._future.add_done_callback(failed)

    async def unless_failed(self, awaitable: Awaitable[Result]) -> Result:
        """What `awaitable` gives.

        Raises:
            RpcmpError: the job failed first; `awaitable` is cancelled.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            futures: list[asyncio.Future[Any]] = [task, self._future]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # what has come in the same moment is not thrown away
                self._future.result()
            return await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RpcmpError):
                await task

    async def reason(self, timeout: float) -> RpcmpError | None:
        """Why the job has failed; waits up to `timeout` seconds for somebody to know."""
        await asyncio.wait([self._future], timeout=timeout)
        known = self._future.done() and not self._future.cancelled()
        error = self._future.exception() if known else None
        return error if isinstance(error, RpcmpError) else None

    async def close(self) -> None:
        """End all that runs beside."""
        self.ignore()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._future.cancel()

    async def _follow(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except RpcmpError as error:
            self.fail(error)
        except Exception as error:
            self.fail(JobError(f"supervising the job failed: {one_line(error)}"))
            raise


async def both(first: Awaitable[Any], second: Awaitable[Any]) -> tuple[Any, Any]:
    """Run both together; the first error cancels the other."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        one, two = await asyncio.gather(*tasks)
        return one, two
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


WITH_OTHERS = ("join", "sum")
"""Phases that end once all have come to them: in one of these, a stage may wait for who hangs."""


class Watchdog:
    """Watches the driver's progress, and asks the stages when there is none.

    Args:
        seconds: without any progress that count as a hang; 0: nothing does.
        stages: to be asked.
    """

    def __init__(self, seconds: float, stages: WorkerGroup) -> None:
        self._seconds = seconds
        self._stages = stages
        self._moved = time.monotonic()
        self._driver: Doing | None = None

    def note(self, doing: Doing) -> None:
        """Hear what the driver process does; one that waits for us is not stuck."""
        if self._driver is None or self._driver[:3] != doing[:3] or not doing.phase:
            self._moved = time.monotonic()
        self._driver = doing

    async def run(self) -> None:
        """Return never.

        Raises:
            WorkerHungError: nothing moves any more; names what does not.
        """
        while True:
            left = self._moved + (self._seconds or float("inf")) - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, 3600.0))
                continue
            found = await self._stages.inspect()
            youngest = min((answer.doing.seconds for answer in found.values()), default=0.0)
            if youngest >= self._seconds:
                raise _named(self._driver, found)
            self._moved = time.monotonic() - youngest


def _named(driver: Doing | None, found: dict[str, pb.InspectResponse]) -> WorkerHungError:
    """The stage that has been in the middle of something for the longest time; else the driver.

    One that does something of its own comes before those that may wait for it.
    """
    busy = {stage: answer for stage, answer in found.items() if answer.doing.phase}
    stage, answer = max(
        busy.items(),
        key=lambda item: (item[1].doing.phase not in WITH_OTHERS, item[1].doing.seconds),
        default=("driver", pb.InspectResponse(doing=driver and pb.Doing(**driver._asdict()))),
    )
    doing = answer.doing
    return WorkerHungError(
        stage,
        answer.host,
        0,
        doing.phase,
        doing.step,
        doing.microbatch,
        doing.seconds,
        answer.stacks,
    )
