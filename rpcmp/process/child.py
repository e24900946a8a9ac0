"""A supervisor's child process: started or forked, its messages received, ended.

A child is spawned from the event loop's thread, which lives as long as the supervisor:
PR_SET_PDEATHSIG fires when the *thread* that spawned ends. A forked child ends with its fork
server, and that with the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import platform
import signal
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpcmp.errors import WorkerDiedError, WorkerHungError, from_wire, one_line
from rpcmp.process import interpreter
from rpcmp.process.activity import (
    DUMP_SIGNAL,
    FORCED_DUMP_SIGNAL,
    Activity,
    Stacks,
    resident_bytes,
)
from rpcmp.process.channel import Message, parse
from rpcmp.process.fork_client import Forks
from rpcmp.process.forked import Forked
from rpcmp.process.logging.collector import LineHandler, Output, Receiver
from rpcmp.process.logging.records import Line, entry_of, pass_on
from rpcmp.process.memory_access import MemoryLender
from rpcmp.process.resources import (
    MULTIPROCESSING,
    create_folder,
    memory_kills,
    memory_limit,
    remove_folder,
    shared_memory,
    sweep,
)
from rpcmp.process.sandbox.confinement import SCRATCH, FileAccess
from rpcmp.process.stopped import kernel_state, kill_if_stopped

MAX_MESSAGE = 64 * 2**20
"""Bytes of the longest message that a child may send, by default."""

LAST_WORDS_SECONDS = 0.2
"""How long a child's last message may take to arrive after its end."""

MEMORY_SECONDS = 0.4
"""Between two looks at a child's memory; a heartbeat comes each half second."""

STACKS_SECONDS = 0.5
"""How long a child may take to dump its stacks, per signal."""


class Child:
    """A running `python -m MODULE` with a channel to it. Created by `spawn`.

    Attributes:
        log: receives what its Python code prints and logs.
        lender: opens the memory of other processes for it.
        scratch: its folder for temporary files if it is confined; removed with it.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process | Forked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stacks: Stacks,
        activity: Activity,
        log: Receiver,
        lender: MemoryLender,
        scratch: Path | None = None,
        output: Output | None = None,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.stacks = stacks
        self.activity = activity
        self.log = log
        self.lender = lender
        self.scratch = scratch
        self._output = output
        self._hang: asyncio.Task[WorkerHungError] | None = None
        self._memory_kills = memory_kills()
        self._resident, self._resident_at = 0, 0.0

    @classmethod
    async def spawn(
        cls,
        module: str,
        environment: Mapping[str, str],
        file_access: FileAccess | None,
        fds: Sequence[int] = (),
        forks: Forks | None = None,
        on_line: LineHandler | None = None,
        max_message_bytes: int = MAX_MESSAGE,
    ) -> Child:
        """Start `python -m module CHANNEL PARENT_PID STACKS ACTIVITY LOG HELD MEMORY FDS...`.

        Args:
            file_access: what it may open; None: it is not confined. Only a fork can be.
            forks: where to fork it; None to start an interpreter, which imports everything anew.
            on_line: called with each of its log lines; None to add them to our own log.
            max_message_bytes: of the longest message that it may send.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        stacks, memory = Stacks(), shared_memory("rpcmp-activity", mmap.PAGESIZE)
        activity = Activity(memory)
        on_line = on_line or log_as(module)
        log, lender = Receiver(on_line), MemoryLender()
        with contextlib.ExitStack() as on_error, theirs, os.fdopen(memory):
            on_error.enter_context(ours)  # a child without an owner ends when this is closed
            on_error.callback(log.close)
            on_error.callback(lender.close)
            inherited = (theirs.fileno(), stacks.fd, memory, *log.fds, lender.fd, *fds)
            folder, output = None, None
            if file_access is not None:
                folder, output = create_folder(SCRATCH), Output(on_line)
                on_error.callback(remove_folder, folder)
                on_error.callback(output.close)
            process: asyncio.subprocess.Process | Forked
            if forks is None:
                channel, *more = inherited
                arguments = [str(each) for each in (channel, os.getpid(), *more)]
                process = await interpreter.start(module, arguments, environment, inherited)
            else:
                if output is not None:
                    inherited = (*inherited, *output.fds)
                process = await forks.fork(
                    module, environment, inherited, file_access, str(folder or "")
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=max_message_bytes)
            log.start(loop)
            lender.start()
            if output is not None:
                output.start(loop)
            on_error.pop_all()
        return cls(process, reader, writer, stacks, activity, log, lender, folder, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n if signal n ended it."""
        return self._process.returncode

    def describe_exit(self, where: str, less_memory: str) -> str:
        """Return how it has ended, to follow its name: "was ended by signal 9 (SIGKILL)".

        Args:
            where: what it did, " in forward at step 3".
            less_memory: what to do if the kernel has killed it for memory.
        """
        code = self.exit_code
        if code != -signal.SIGKILL or memory_kills() == self._memory_kills:
            return f"{interpreter.describe_exit(code)}{where}"
        had, limit = self._resident / 2**20, memory_limit() / 2**20
        return (
            f"was ended by the kernel for memory{where}: it had {had:,.0f} MiB of {limit:,.0f} "
            f"MiB; {less_memory}"
        )

    def send(self, message: Message) -> None:
        """Send one message; it is lost if the child has ended."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, order: Message) -> Message:
        """Send a one-shot child its order, and return its answer; ends the child.

        Raises:
            RpcmpError: the child answered with an "error".
            WorkerDiedError: it ended without an answer.
        """
        self.send(order)
        name = f"a process that was to {order['op']}"
        watching = asyncio.ensure_future(kill_if_stopped(self._process, name))
        try:
            async with contextlib.aclosing(self.messages()) as messages:
                async for answer in messages:
                    if answer["event"] == "error":
                        raise from_wire(answer["error"])
                    return answer
            code = await self.wait()
        except ValueError as error:
            raise self.garbled_message_error(error) from error
        finally:
            watching.cancel()
            await self.kill()
        how = interpreter.describe_exit(code)
        raise WorkerDiedError(f"{name} (pid {self.pid}) {how}")

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the child's messages until it has ended.

        The end of the channel is not enough: a fork of the user's code may hold a copy of it.

        Raises:
            ValueError: it sends something that is not a message, or a very long one.
        """
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while line := await self._next_line(ended):
                self._look_at_memory()
                yield parse(line)
        finally:
            ended.cancel()

    def _look_at_memory(self) -> None:
        """Remember from time to time how much it has: once it is gone, that is unknown."""
        if (now := time.monotonic()) - self._resident_at < MEMORY_SECONDS:
            return
        self._resident_at = now
        if found := resident_bytes(self.pid):  # else it has just ended, perhaps for memory
            self._resident, self._memory_kills = found, memory_kills()

    async def _next_line(self, ended: asyncio.Future[int]) -> bytes:
        reading = asyncio.ensure_future(self._reader.readline())
        either: list[asyncio.Future[Any]] = [reading, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.cancel()
            raise
        if not reading.done():  # it has ended: its last message may still arrive
            await asyncio.wait([reading], timeout=LAST_WORDS_SECONDS)
        if not reading.done():
            reading.cancel()
            return b""
        try:
            line = reading.result()
        except ConnectionError:
            return b""
        return line if line.endswith(b"\n") else b""

    async def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, or None if the child still runs after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._process.wait()
        return None

    async def kill(self) -> None:
        """End it, with what it has forked, and remove what it leaves."""
        interpreter.kill_group(self._process.pid)
        await self._process.wait()
        if self._output is not None:
            self._output.close()
        self.log.close()
        self.lender.close()
        self._writer.close()
        if self.scratch is not None:  # on a thread: there may be much in it
            await asyncio.to_thread(remove_folder, self.scratch)
        await asyncio.to_thread(sweep, MULTIPROCESSING)

    def garbled_message_error(self, error: Exception, who: str = "a process") -> WorkerDiedError:
        """Return the error for a message of this child that cannot be parsed.

        Args:
            who: sent it, such as "the worker of stage 'a'".
        """
        return WorkerDiedError(
            f"{who} on {platform.node()} (pid {self.pid}) sent an invalid message: "
            f"{one_line(error)}: its memory is corrupt, or its code writes to descriptors that are "
            "not its own"
        )

    async def record_hang(self, stage: str, seconds: float) -> WorkerHungError:
        """Return the error for missing heartbeats, with the child's activity and stacks."""
        self._hang = asyncio.create_task(self._hung_error(stage, seconds))
        return await asyncio.shield(self._hang)

    async def hung_error(self) -> WorkerHungError | None:
        """Return what `record_hang` found, if it was called: the stack dump may end the child."""
        return None if self._hang is None else await asyncio.shield(self._hang)

    async def _hung_error(self, stage: str, seconds: float) -> WorkerHungError:
        activity = self.activity.read()  # before the dump wakes it up
        return WorkerHungError(
            stage=stage,
            host=platform.node(),
            pid=self.pid,
            phase=activity.phase,
            step=activity.step,
            microbatch=activity.microbatch,
            seconds=seconds,
            stacks=await self.stack_dump(),
        )

    async def stack_dump(self) -> str:
        """Return the stacks of the child's threads, after the process's state; the child goes on.

        A stopped child is woken up for it. A child that does not answer may crash.
        """
        state = kernel_state(self.pid)
        size = self.stacks.size
        for signum in (DUMP_SIGNAL, FORCED_DUMP_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)
                os.kill(self.pid, signal.SIGCONT)
            if await self._dumps_more_than(size):
                break
        return f"{state}\n{self.stacks.read(size)}"

    async def _dumps_more_than(self, size: int) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACKS_SECONDS):
                while self.stacks.size == size and self.exit_code is None:
                    await asyncio.sleep(0.05)
        if self.stacks.size == size:
            return self.exit_code is not None
        await asyncio.sleep(0.05)  # it is written line by line
        return True


def log_as(module: str) -> LineHandler:
    """Return a function that adds a child's lines to our own log, under the name of `module`."""
    name = module.removeprefix("rpcmp.")

    def on_line(line: Line) -> None:
        pass_on(entry_of(line, name, generation=0))

    return on_line
