"""The errors of a child that hangs, and of a child that exits."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from rpcmp.process.activity import Activity, Stacks
from rpcmp.process.child import Child
from rpcmp.process.logging.collector import Receiver
from rpcmp.process.memory_access import MemoryLender
from tests.support.eventloops import in_event_loop


async def child_that(code: str) -> Child:
    """Start a child that runs `code` and ignores all messages."""
    ours, theirs = socket.socketpair()
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    log = Receiver(lambda line: None)
    return Child(process, reader, writer, Stacks(), Activity(), log, MemoryLender())


@in_event_loop
async def test_hung_error_survives_a_stack_dump_that_ends_the_child() -> None:

    child = await child_that("import time; time.sleep(600)")
    child.activity.start("backward", 3, 1)
    try:
        asking = asyncio.create_task(child.record_hang("a", 6.0))
        assert await child.wait(60) == -signal.SIGUSR1  # the child does not handle the signal
        error = await child.hung_error()
        assert error is await asking
        assert error is not None
        assert "stage 'a'" in str(error)
        assert "in backward of micro-batch 1 at step 3" in str(error)
    finally:
        await child.kill()


@in_event_loop
async def test_a_child_that_exits_has_no_hung_error() -> None:

    child = await child_that("raise SystemExit(3)")
    try:
        assert await child.wait(60) == 3
        assert await child.hung_error() is None
    finally:
        await child.kill()
