"""Forked children: they equal spawned ones, and end with their supervisor."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from rpcmp.errors import JobError, WorkerDiedError
from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.resources import MULTIPROCESSING
from tests.support.eventloops import in_event_loop
from tests.support.forkedchildren import ONE_THREAD, end, forks, spawn, write_modules
from tests.support.processes import makes_networks, no_more_files, poll_for, runs


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(tmp_path, monkeypatch)


@in_event_loop
async def test_a_forked_child_equals_a_spawned_one() -> None:
    async def found(by: Forks | None) -> dict[str, object]:
        ours, theirs = os.pipe()
        os.write(theirs, b"inherited")
        child, reply = await spawn(by, [ours])
        assert reply["group"] == child.pid
        assert runs(psutil.Process(child.pid), "child")
        for fd in (ours, theirs):
            os.close(fd)
        await end(child)
        own = {"group", "preloaded_in", "open"}
        # A forked child has descriptors of its network namespace, and of the user namespace that
        # it needs if the user is not root.
        namespaces = 0 if by is None or not makes_networks() else 1 + (os.geteuid() != 0)
        count = len(reply["open"]) - namespaces  # type: ignore[arg-type]
        return {key: value for key, value in reply.items() if key not in own} | {"open": count}

    async with forks() as by:
        assert await found(by) == await found(None)


@in_event_loop
async def test_a_fork_server_may_start_before_it_is_needed_and_imports_once() -> None:
    async with forks() as by:
        server = await started(by)
        for _ in range(2):
            child, reply = await spawn(by)
            assert reply["preloaded_in"] == server != child.pid
            await end(child)


@in_event_loop
async def test_a_fork_server_that_was_not_used_is_killed(tmp_path: Path) -> None:
    """It may import for seconds before it sees that its line has ended."""
    (tmp_path / "slow.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    async with Forks(["slow"]) as by:
        server = await started(by)
    assert not psutil.pid_exists(server)


async def started(by: Forks) -> int:
    """Start a fork server before it is needed; return its process id."""
    before = psutil.Process().children()
    await by.start()
    (server,) = {*psutil.Process().children()} - {*before}
    return server.pid


@pytest.mark.parametrize(
    ("order", "code"), [({"op": "exit", "code": 7}, 7), ({"op": "raise"}, 1), (None, -9)]
)
def test_a_forked_child_reports_its_exit_code(
    order: dict[str, object] | None, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with forks() as by:
            child, _ = await spawn(by)
            other, _ = await spawn(by)
            assert child.exit_code is None
            if order is None:
                os.kill(child.pid, signal.SIGKILL)
            else:
                child.send(order)
            assert await child.wait() == code == child.exit_code
            await child.kill()
            assert other.exit_code is None
            await end(other)

    asyncio.run(run())
    assert ("planted" in caplog.text) is (order == {"op": "raise"})


@in_event_loop
async def test_a_fork_server_restarts_after_dying_with_its_children() -> None:

    async with forks() as by:
        child, reply = await spawn(by)
        child.send({"op": "hang"})
        os.kill(int(str(reply["preloaded_in"])), signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        another, other_reply = await spawn(by)
        assert other_reply["preloaded_in"] != reply["preloaded_in"]
        await end(another)


@in_event_loop
async def test_a_fork_server_that_dies_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text("raise RuntimeError('planted')\n")

    async with forks() as by:
        with pytest.raises(
            WorkerDiedError, match="forks workers has died; its standard error says why"
        ):
            await spawn(by)


@in_event_loop
async def test_a_fork_server_that_may_open_no_more_files_says_so() -> None:
    """The kernel drops the descriptors that come with an order; a child would miss some."""

    async with forks() as by:
        child, reply = await spawn(by)
        server = psutil.Process(int(str(reply["preloaded_in"])))
        before = server.num_fds()
        with no_more_files(server):
            with pytest.raises(WorkerDiedError, match=r"cannot fork: .*Too many open files"):
                await spawn(by)
            (line := await by.new_line()).setblocking(False)
            with line:
                assert not await asyncio.get_running_loop().sock_recv(line, 1)
        assert server.num_fds() == before
        another, other_reply = await spawn(by)
        assert other_reply["preloaded_in"] == server.pid
        for each in (child, another):
            await end(each)


@in_event_loop
async def test_a_supervisor_that_may_open_no_more_files_is_told() -> None:

    async with forks() as by:
        child, _ = await spawn(by)
        with no_more_files(), pytest.raises(JobError, match="Too many open files"):
            await by.connectable()
        (await by.connectable()).close()
        await end(child)


@in_event_loop
async def test_another_environment_restarts_the_fork_server() -> None:

    async with forks() as by:
        child, reply = await spawn(by)
        await end(child)
        child, other_reply = await spawn(by, environment=compute_environment(threads=2))
        assert (reply["threads"], other_reply["threads"]) == ("1", "2")
        assert reply["preloaded_in"] != other_reply["preloaded_in"]
        await end(child)


@in_event_loop
async def test_children_end_with_the_line_that_forked_them() -> None:

    async with forks() as by, Forks(["preloaded"], await by.new_line()) as borrowed:
        ours, reply = await spawn(by)
        theirs, other_reply = await spawn(borrowed)
        assert reply["preloaded_in"] == other_reply["preloaded_in"]
        theirs.send({"op": "hang"})
        await borrowed.close()
        assert await theirs.wait() == -signal.SIGKILL
        poll_for(lambda: not psutil.pid_exists(theirs.pid), "the child to be gone")
        await end(ours)
        again, other_reply = await spawn(borrowed)  # by a fork server of its own
        assert reply["preloaded_in"] != other_reply["preloaded_in"]
        await end(again)


@in_event_loop
async def test_a_fork_server_removes_what_its_last_children_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else does it for a supervisor that was killed, as `borrowed` stands for one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def left() -> list[Path]:
        return list(tmp_path.glob(f"{MULTIPROCESSING}*"))

    async with forks() as by:
        borrowed = Forks(["preloaded"], await by.new_line())
        theirs, _ = await spawn(borrowed)
        theirs.send({"op": "hang"})
        assert len(left()) == 1
        await by.close()
        assert left() == []
        await theirs.kill()


@in_event_loop
async def test_a_fork_server_removes_semaphores_that_its_supervisor_could_not() -> None:
    """Such as one that may open no more files, and ends for it."""

    async with forks() as by:
        child, _ = await spawn(by)
        left = Path(f"/dev/shm/sem.rpcmp-{os.stat('/proc/self/ns/pid').st_ino}-{child.pid}-x")
        await asyncio.to_thread(left.touch)
        child.send({"op": "exit", "code": 3})
        assert await child.wait() == 3
        assert not await asyncio.to_thread(left.exists)
        await child.kill()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@in_event_loop
async def test_one_new_fork_server_replaces_a_lost_one_for_all(signum: signal.Signals) -> None:

    lender, borrower = socket.socketpair()
    with lender:
        async with forks() as by, Forks(["preloaded"], await by.new_line(), lender) as other:
            lending = asyncio.create_task(by.lend(borrower))
            children = [await spawn(each) for each in (by, other)]
            os.kill(int(str(children[0][1]["preloaded_in"])), signum)
            assert [await child.wait() for child, _ in children] == [-signal.SIGKILL] * 2
            again, reply = await spawn(other)
            also, also_reply = await spawn(by)
            assert reply["preloaded_in"] == also_reply["preloaded_in"]
            await end(again)
            await end(also)
        lender.shutdown(socket.SHUT_RDWR)
        await lending


@in_event_loop
async def test_a_supervisor_that_was_cancelled_while_it_asked_for_a_line_still_gets_one() -> None:
    """With a fork server of its own its processes would be in a network of their own."""

    lender, borrower = socket.socketpair()
    with lender:
        async with forks() as by, Forks(["preloaded"], None, lender) as other:
            child, reply = await spawn(by)
            asking = asyncio.create_task(spawn(other))
            peek = functools.partial(borrower.recv, 1, socket.MSG_PEEK)
            await asyncio.to_thread(peek)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            lending = asyncio.create_task(by.lend(borrower))
            for _ in range(2):
                theirs, other_reply = await spawn(other)
                assert other_reply["preloaded_in"] == reply["preloaded_in"]
                await end(theirs)
            await end(child)
        lender.shutdown(socket.SHUT_RDWR)
        await lending


@in_event_loop
async def test_a_supervisor_that_gets_no_line_starts_a_fork_server_of_its_own() -> None:

    lender, borrower = socket.socketpair()
    borrower.close()
    with lender:
        async with Forks(["preloaded"], None, lender) as by:
            child, _ = await spawn(by)
            await end(child)


@in_event_loop
async def test_a_child_is_killed_if_its_fork_was_cancelled(token: str) -> None:

    async with forks() as by:
        first, _ = await spawn(by)
        spawning = asyncio.create_task(Child.spawn("child", ONE_THREAD, None, [], by))
        await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.gather(spawning, return_exceptions=True)
        last, reply = await spawn(by)
        server = psutil.Process(int(str(reply["preloaded_in"])))
        await end(first)
        await end(last)
        poll_for(lambda: not server.children(), "no child to be left")
