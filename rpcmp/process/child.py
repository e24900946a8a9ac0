"""A supervisor's one child: spawned or forked, listened to, ended.

Spawned from the event loop's thread, which lives as long as the supervisor: PR_SET_PDEATHSIG fires
when the *thread* that spawned ends. One that was forked ends with its fork server, and that with
the supervisor.
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
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpcmp.errors import WorkerDiedError, WorkerHungError, from_wire, one_line
from rpcmp.process import descriptors, interpreter
from rpcmp.process.activity import ASKING, INSISTING, Activity, Stacks
from rpcmp.process.channel import Message, parse
from rpcmp.process.confinement import SCRATCH, Reach
from rpcmp.process.fork_client import Forked, Forks
from rpcmp.process.logging.receiver import Hear, Output, Receiver
from rpcmp.process.logging.records import Line, entry_of, pass_on
from rpcmp.process.tempdirs import create, remove

MAX_MESSAGE = 64 * 2**20
"""Bytes of the longest message that a child may send, if nothing else is said."""

LAST_WORDS_SECONDS = 0.2
"""How long after its end a child's last message may still be under way."""

STACKS_SECONDS = 0.5
"""How long a child may take to write down where it is before it is made to, and then again."""


class Child:
    """A running `python -m MODULE` with a channel to it. Made by `spawn`.

    Attributes:
        stacks: where in its code it was when it crashed or was asked.
        activity: what it does.
        log: what its Python code says.
        scratch: its folder for temporary files, if it is confined; gone with it.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process | Forked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stacks: Stacks,
        activity: Activity,
        log: Receiver,
        scratch: Path | None = None,
        output: Output | None = None,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.stacks = stacks
        self.activity = activity
        self.log = log
        self.scratch = scratch
        self._output = output
        self._silence: asyncio.Task[WorkerHungError] | None = None

    @classmethod
    async def spawn(
        cls,
        module: str,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        forks: Forks | None = None,
        hear: Hear | None = None,
        reach: Reach | None = None,
        limit: int = MAX_MESSAGE,
    ) -> Child:
        """Start `python -m module CHANNEL PARENT_PID STACKS ACTIVITY LOG HELD FDS...`.

        Args:
            module: has a `__main__` that calls `rpcmp.process.channel.begin_child`.
            environment: set in addition to our own.
            fds: file descriptors to inherit, see `rpcmp.process.channel.ChildContext`.
            forks: fork it there; None: start an interpreter, which imports everything anew.
            hear: told of each line that it says; None: our own log has them.
            reach: what it may open; None: it is not confined. Only what is forked can be.
            limit: bytes of the longest message that it may send.

        Raises:
            WorkerDiedError: the process that forks has died.
        """
        ours, theirs = socket.socketpair()
        stacks, memory = Stacks(), descriptors.memory("rpcmp-activity", mmap.PAGESIZE)
        activity = Activity(memory)
        hear = hear or _heard_from(module)
        log = Receiver(hear)
        with contextlib.ExitStack() as on_error, theirs, os.fdopen(memory):
            on_error.enter_context(ours)  # its end is the end of a child that nobody owns
            on_error.callback(log.close)
            inherited = (theirs.fileno(), stacks.fd, memory, *log.fds, *fds)
            folder, output = None, None
            if reach is not None:
                folder, output = create(SCRATCH), Output(hear)
                on_error.callback(remove, folder)
                on_error.callback(output.close)
            process: asyncio.subprocess.Process | Forked
            if forks is None:
                channel, *more = inherited
                arguments = [str(each) for each in (channel, os.getpid(), *more)]
                process = await interpreter.start(module, arguments, environment, inherited)
            else:
                if output is not None:
                    inherited = (*inherited, output.fd)
                process = await forks.fork(module, environment, inherited, reach, str(folder or ""))
            reader, writer = await asyncio.open_connection(sock=ours, limit=limit)
            log.begin()
            if output is not None:
                output.begin()
            on_error.pop_all()
        return cls(process, reader, writer, stacks, activity, log, folder, output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n when signal n ended it."""
        return self._process.returncode

    def send(self, message: Message) -> None:
        """Send one message; it is lost where the child has ended."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, order: Message) -> Message:
        """The answer of a child that has one thing to do; ends the child.

        Raises:
            RpcmpError: what the child answered with an "error".
            WorkerDiedError: it ended without an answer.
        """
        self.send(order)
        try:
            async with contextlib.aclosing(self.messages()) as messages:
                async for answer in messages:
                    if answer["event"] == "error":
                        raise from_wire(answer["error"])
                    return answer
            code = await self.wait()
        except ValueError as error:
            raise self.talks_nonsense(error) from error
        finally:
            await self.kill()
        how = interpreter.told(code)
        raise WorkerDiedError(f"a process that was to {order['op']} (pid {self.pid}) {how}")

    async def messages(self) -> AsyncGenerator[Message, None]:
        """What the child says, until it has ended.

        The end of the line is not enough: a process that the user's code has forked holds a copy.

        Raises:
            ValueError: it says something that is no message, or a very long one.
        """
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while line := await self._line(ended):
                yield parse(line)
        finally:
            ended.cancel()

    async def _line(self, ended: asyncio.Future[int]) -> bytes:
        """The next line; nothing where there will be none."""
        reading = asyncio.ensure_future(self._reader.readline())
        either: list[asyncio.Future[Any]] = [reading, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.cancel()
            raise
        if not reading.done():  # it has ended: what it said before is on its way
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
        """The exit code, or None if the child still runs after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._process.wait()
        return None

    async def kill(self) -> None:
        """End the child at once, and what it has forked; returns when it is gone."""
        interpreter.kill_group(self._process.pid)
        await self._process.wait()
        if self._output is not None:
            self._output.close()
        self.log.close()
        self._writer.close()
        if self.scratch is not None:  # on a thread: there may be much in it
            await asyncio.to_thread(remove, self.scratch)

    def talks_nonsense(self, error: Exception, who: str = "a process") -> WorkerDiedError:
        """The error that says that a message of this child could not be understood.

        Args:
            error: why not.
            who: it is, "the worker of stage 'a'".
        """
        return WorkerDiedError(
            f"{who} on {platform.node()} (pid {self.pid}) speaks nonsense: {one_line(error)}: its "
            "memory is broken, or its code writes to descriptors that are not its own"
        )

    async def hung(self, stage: str, seconds: float) -> WorkerHungError:
        """The error that says what this child was doing when it was not heard of any more."""
        self._silence = asyncio.create_task(self._tell_hung(stage, seconds))
        return await asyncio.shield(self._silence)

    async def was_hung(self) -> WorkerHungError | None:
        """Why it was to be ended before it did, if it was: to be asked for that may crash it."""
        return None if self._silence is None else await asyncio.shield(self._silence)

    async def _tell_hung(self, stage: str, seconds: float) -> WorkerHungError:
        doing = self.activity.read()  # before it is woken up
        return WorkerHungError(
            stage=stage,
            host=platform.node(),
            pid=self.pid,
            phase=doing.phase,
            step=doing.step,
            microbatch=doing.microbatch,
            seconds=seconds,
            stacks=await self.where(),
        )

    async def where(self) -> str:
        """Where in the code its threads are, with what the kernel says of it; it goes on.

        A child that is stopped has to be woken up for it; one that does not answer may crash by it.
        """
        state = _state(self.pid)
        size = self.stacks.size
        for signum in (ASKING, INSISTING):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)
                os.kill(self.pid, signal.SIGCONT)
            if await self._writes_more_than(size):
                break
        return f"{state}\n{self.stacks.read(size)}"

    async def _writes_more_than(self, size: int) -> bool:
        """Whether it soon has, or has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACKS_SECONDS):
                while self.stacks.size == size and self.exit_code is None:
                    await asyncio.sleep(0.05)
        if self.stacks.size == size:
            return self.exit_code is not None
        await asyncio.sleep(0.05)  # it is written line by line
        return True


def _heard_from(module: str) -> Hear:
    """What hears a child that works for no group."""
    name = module.removeprefix("rpcmp.")

    def hear(line: Line) -> None:
        pass_on(entry_of(line, name, generation=0))

    return hear


def _state(pid: int) -> str:
    """ "State: T (stopped)", as the kernel says it; empty where that is not to be had."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.replace("\t", " ") for line in lines if line.startswith("State:")), "")
