"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

SECONDS = 60.0
"""After which a test that hangs fails."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


def in_event_loop(
    test: Callable[Args, Coroutine[Any, Any, Result]],
) -> Callable[Args, Result]:
    """Run a test in an event loop of its own."""

    async def bounded(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        async with asyncio.timeout(SECONDS):
            return await test(*args, **kwargs)

    @functools.wraps(test)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        return asyncio.run(bounded(*args, **kwargs))

    return run
