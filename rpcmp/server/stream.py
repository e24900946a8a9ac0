"""Snapshots and files as streams of messages: read from memory or a disk, and written there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

from rpcmp.checkpoint import files
from rpcmp.checkpoint.inside import Inside
from rpcmp.errors import CheckpointError, UnreachableError
from rpcmp.snapshot.slots import Slots
from rpcmp.v1 import control_pb2 as pb

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of memory that this host has."""


async def blocks(fd: int, length: int) -> AsyncIterator[pb.FetchResponse]:
    """The first `length` bytes of a snapshot's memory."""
    for offset in range(0, length, files.PART):
        data = await asyncio.to_thread(os.pread, fd, min(files.PART, length - offset), offset)
        yield pb.FetchResponse(data=data)


async def receive(stream: AsyncIterator[pb.FetchResponse], slots: Slots, pin: bool = False) -> int:
    """Write the snapshot that `stream` brings into `slots`; returns its step.

    Args:
        pin: keep it until it is saved, where it has to be.

    Raises:
        UnreachableError: the other end was gone before all had arrived.
    """
    head = await anext(stream)
    slot = slots.begin()
    if slot is None:
        raise AssertionError("a mirror pins nothing for longer than a save takes")
    if head.size > MEMORY:
        raise UnreachableError(f"a snapshot of {head.size} bytes is more than this host's memory")
    fd = slots.fd(slot)
    os.ftruncate(fd, head.size)
    offset = 0
    async for part in stream:
        if offset + len(part.data) > head.size:
            raise UnreachableError(f"more than {head.size} bytes of a snapshot have arrived")
        offset += os.pwrite(fd, part.data, offset)
    if offset != head.size:
        raise UnreachableError(f"only {offset} of {head.size} bytes of a snapshot have arrived")
    slots.commit(slot, head.step, head.size, pin=pin and head.is_saved)
    return head.step


async def receive_file(parts: AsyncIterator[bytes], place: Inside, size: int) -> None:
    """Write a file, whose content `parts` brings, to the disk; never holds it as a whole.

    Args:
        place: of the file.
        size: that it has to have.

    Raises:
        UnreachableError: the other end was gone before all had arrived.
        CheckpointError: the disk does not take it.
    """
    loop = asyncio.get_running_loop()

    async def next_part() -> bytes:
        return await anext(parts, b"")

    def content() -> Iterator[bytes]:
        arrived = 0
        while part := asyncio.run_coroutine_threadsafe(next_part(), loop).result():
            arrived += len(part)
            yield part
        if arrived != size:
            raise UnreachableError(f"only {arrived} of {size} bytes of {place} have arrived")

    try:
        await asyncio.to_thread(files.write_durably, place, content())
    except OSError as error:
        raise CheckpointError(f"cannot write {place}: {error.strerror or error}") from error
