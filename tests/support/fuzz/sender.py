"""Many connections at once with one input each; slow ones stay open until others replace them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
from collections.abc import Iterator, Sequence

from tests.support.fuzz.entry_points import EntryPoint
from tests.support.fuzz.inputs import Input, Pace, inputs
from tests.support.fuzz.messages import Job

AT_ONCE = 24
"""Connections that are busy at the same time."""

LINGERING = 100
"""Connections that are slow or silent."""

ANSWER_SECONDS = 0.05
"""Seconds to wait for an answer; most inputs get none."""

DRIP_SECONDS = 0.02

_NO_GOODBYE = struct.pack("ii", 1, 0)


class Sender:
    """A client that sends inputs to servers.

    Args:
        entry_points: the ways to connect.
        addresses: the servers' addresses, which are used in turn.
        job: the running job, once it is known.
        seed: seed of all random choices.
    """

    def __init__(
        self, entry_points: Sequence[EntryPoint], addresses: Sequence[str], job: Job, seed: int
    ) -> None:
        self._draw = random.Random(seed)
        self._entry_points = list(entry_points)
        self._addresses = itertools.cycle(addresses)
        self._inputs: dict[str, Iterator[Input]] = {
            entry_point.name: inputs(self._draw, entry_point.conversations(self._draw, job))
            for entry_point in entry_points
        }
        self._lingering: dict[asyncio.Task[None], None] = {}  # oldest first

    async def send(self, count: int) -> None:
        """Send `count` inputs, then close all connections."""
        left = iter(range(count))
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._send_some(left))
        lingering = list(self._lingering)
        for task in lingering:
            task.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)

    async def _send_some(self, left: Iterator[int]) -> None:
        for _ in left:
            (entry_point,) = self._draw.choices(
                self._entry_points, [entry_point.share for entry_point in self._entry_points]
            )
            one = next(self._inputs[entry_point.name])
            sending = asyncio.create_task(send_one(entry_point, next(self._addresses), one))
            if one.pace is Pace.AT_ONCE:
                await sending
            else:
                await self._linger(sending)

    async def _linger(self, task: asyncio.Task[None]) -> None:
        self._lingering[task] = None
        task.add_done_callback(lambda done: self._lingering.pop(done, None))
        if len(self._lingering) > LINGERING:
            oldest = next(iter(self._lingering))
            oldest.cancel()
            await asyncio.wait([oldest])


async def send_one(entry_point: EntryPoint, address: str, one: Input) -> None:
    """Send one input, and read the start of the server's response."""
    with contextlib.suppress(OSError, EOFError):  # a server may close the connection
        reader, writer = await entry_point.open(address)
        try:
            await _say(reader, writer, one)
        finally:
            _hang_up(writer)


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, one: Input) -> None:
    match one.pace:
        case Pace.NEVER:
            await reader.read()
        case Pace.DRIP:
            for byte in one.data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(DRIP_SECONDS)
            await reader.read()
        case Pace.AT_ONCE:
            writer.write(one.data)
            if one.hangs_up and writer.can_write_eof():
                writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()
                    await reader.read(65536)


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Abort at once: a TLS shutdown would leave a connection behind on the client's side."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if connection is not None:  # asyncio has already dropped it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_GOODBYE)
    writer.transport.abort()
