"""Children that another process has forked: their exit codes, and signals to them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rpcmp.process.forked import UNKNOWN, ForkedChild
from tests.support.eventloops import in_event_loop


def forked(code: int | None) -> ForkedChild:
    """Return a child that exits with a code, or waits to be killed."""
    pid = os.fork()
    if not pid:
        if code is None:
            signal.pause()
        os._exit(code or 0)
    return ForkedChild(pid, asyncio.StreamReader())


@pytest.mark.parametrize("code", [0, 7])
@in_event_loop
async def test_a_child_has_its_exit_code(code: int) -> None:

    child = forked(code)
    assert child.returncode is None
    assert await child.wait() == code == child.returncode
    child.send_signal(signal.SIGKILL)  # to nobody: another process may have its number


@in_event_loop
async def test_a_child_is_sent_signals() -> None:

    child = forked(None)
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


@in_event_loop
async def test_the_code_of_a_child_that_others_have_waited_for_is_unknown() -> None:
    def wait_before_our_loop_does(child: ForkedChild) -> None:
        os.waitpid(child.pid, 0)

    child = forked(7)
    wait_before_our_loop_does(child)
    assert await child.wait() == UNKNOWN
