"""The first error ends the job, wherever it comes from and whoever waits for whatever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rpcmp.errors import JobError, RpcmpError, one_line

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
