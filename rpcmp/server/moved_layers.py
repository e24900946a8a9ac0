"""Snapshots of other stages that a fresh worker takes its layers from, after the cut has moved.

    servers of the stages that had them ──fetch──> memory of this server ──inherited──> worker

The worker opens its own server's slots besides. What is here is dropped once the worker has joined
its group: from then on its own snapshots are of the new cut.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from rpcmp.checkpoint.slots import NUM_SLOTS
from rpcmp.errors import CheckpointError, UnreachableError
from rpcmp.process.resources import free_memory
from rpcmp.v1 import control_pb2 as pb

MAX_PARTS = 8
"""Stages besides its own that a stage may take layers over from at a time."""


class PartMemory:
    """Room for `MAX_PARTS` snapshots; an unused one costs nothing.

    Attributes:
        fds: what the worker inherits, after its slots'.
    """

    def __init__(self) -> None:
        self.fds = tuple(os.memfd_create(f"rpcmp-part-{n}") for n in range(MAX_PARTS))
        self._used = 0

    async def add(self, stream: AsyncIterator[pb.FetchResponse], step: int, cut: int) -> int:
        """Hold the snapshot of a Fetch stream; return its place among what the worker inherits."""
        if self._used == MAX_PARTS:
            raise CheckpointError(f"a stage takes layers from more than {MAX_PARTS} other stages")
        number = self._used
        self._used += 1
        head = await anext(stream, pb.FetchResponse())
        if (head.step, head.cut) != (step, cut):
            raise UnreachableError(f"step {head.step} has arrived, and step {step} was asked for")
        await fill(self.fds[number], head, stream)
        return 1 + NUM_SLOTS + number

    def free(self) -> None:
        for fd in self.fds[: self._used]:
            os.ftruncate(fd, 0)
        self._used = 0


async def fill(fd: int, head: pb.FetchResponse, stream: AsyncIterator[pb.FetchResponse]) -> None:
    """Write the snapshot that `head` has described into memory, in place of what is there.

    Raises:
        UnreachableError: there is no memory for it, or it is longer or shorter than was announced.
    """
    # What it holds, and not how long it is: memory that nobody has written to is none.
    if head.size - 512 * os.fstat(fd).st_blocks > free_memory():
        raise UnreachableError(
            f"a snapshot of {head.size} bytes is more than the memory that is left on this host"
        )
    os.ftruncate(fd, head.size)
    try:
        await _write(fd, head.size, stream)
    except BaseException:
        os.ftruncate(fd, 0)
        raise


async def _write(fd: int, size: int, stream: AsyncIterator[pb.FetchResponse]) -> None:
    offset = 0
    async for part in stream:
        if offset + len(part.data) > size:
            raise UnreachableError(f"more than {size} bytes of a snapshot have arrived")
        offset += os.pwrite(fd, part.data, offset)
    if offset != size:
        raise UnreachableError(f"only {offset} of {size} bytes of a snapshot have arrived")
