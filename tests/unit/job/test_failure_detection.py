"""FirstFailure and task groups: the first error ends all waiting."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rpcmp.errors import BusyError, JobError
from rpcmp.job.failure_detection import FirstFailure, task_group


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def raises(error: Exception) -> None:
    raise error


async def gives(value: int) -> int:
    return value


async def never() -> None:
    await asyncio.Event().wait()


@in_a_loop
async def test_all_waiters_raise_the_failure_detection() -> None:
    failure = FirstFailure()
    waiting = [asyncio.ensure_future(failure.unless_failed(never())) for _ in range(2)]
    failure.supervise(raises(BusyError("first")))
    for waiter in waiting:
        with pytest.raises(BusyError, match="first"):
            await waiter
    failure.fail(JobError("second"))
    assert str(await failure.reason(0)) == "first"
    await failure.close()


@in_a_loop
async def test_unless_failed_returns_the_result_without_a_failure() -> None:
    failure = FirstFailure()
    assert await failure.unless_failed(gives(7)) == 7
    assert await failure.reason(0) is None
    await failure.close()


@in_a_loop
async def test_unless_failed_raises_the_error_of_its_awaitable() -> None:
    failure = FirstFailure()
    with pytest.raises(BusyError):
        await failure.unless_failed(raises(BusyError("own")))
    await failure.close()


@in_a_loop
async def test_an_unexpected_error_in_a_background_task_is_a_failure() -> None:
    failure = FirstFailure()
    failure.supervise(raises(ZeroDivisionError("oops")))
    error = await failure.reason(5)
    assert "ZeroDivisionError: oops" in str(error)
    await failure.close()


@in_a_loop
async def test_failures_are_ignored_once_the_generation_ends() -> None:
    failure = FirstFailure()
    failure.ignore()
    failure.fail(JobError("a connection broke"))
    assert await failure.reason(0) is None
    await failure.close()


@in_a_loop
async def test_a_task_group_awaits_all_tasks_or_raises_the_first_error() -> None:
    async with task_group() as tasks:
        both = [tasks.create_task(gives(number)) for number in (1, 2)]
    assert [task.result() for task in both] == [1, 2]
    waiting: list[asyncio.Task[None]] = []

    async def wait_and_fail() -> None:
        async with task_group() as tasks:
            waiting.append(tasks.create_task(never()))
            tasks.create_task(raises(BusyError("no")))

    with pytest.raises(BusyError, match="no"):
        await wait_and_fail()
    assert waiting[0].cancelled()


@in_a_loop
async def test_a_cancelled_task_group_cancels_its_tasks() -> None:
    waiting: list[asyncio.Task[None]] = []

    async def wait() -> None:
        async with task_group() as tasks:
            waiting.append(tasks.create_task(never()))

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiting[0].cancelled()
