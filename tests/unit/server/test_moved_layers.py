"""Memory for snapshots of other stages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from rpcmp.checkpoint.slots import NUM_SLOTS
from rpcmp.errors import CheckpointError, UnreachableError
from rpcmp.server import moved_layers
from rpcmp.server.moved_layers import MAX_PARTS, PartMemory
from rpcmp.v1 import control_pb2 as pb


async def stream(size: int, *parts: bytes) -> AsyncIterator[pb.FetchResponse]:
    yield pb.FetchResponse(size=size)
    for part in parts:
        yield pb.FetchResponse(data=part)


def test_snapshots_lie_where_the_worker_finds_them() -> None:
    memory = PartMemory()
    inherited = (*[-1] * (1 + NUM_SLOTS), *memory.fds)
    for content in (b"first", b"other"):
        place = asyncio.run(memory.add(stream(5, content[:2], content[2:]), 0, 0))
        assert os.pread(inherited[place], 9, 0) == content
    memory.free()
    assert [os.fstat(fd).st_size for fd in memory.fds] == [0] * MAX_PARTS
    place = asyncio.run(memory.add(stream(0), 0, 0))
    assert place == 1 + NUM_SLOTS


@pytest.mark.parametrize(("size", "sent"), [(9, b"short"), (4, b"long."), (1001, b"")])
def test_a_snapshot_of_another_size_is_refused(
    size: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_layers, "free_memory", lambda: 1000)
    with pytest.raises(UnreachableError):
        asyncio.run(PartMemory().add(stream(size, sent), 0, 0))


def test_there_is_room_for_so_many() -> None:
    memory = PartMemory()
    for _ in range(MAX_PARTS):
        asyncio.run(memory.add(stream(1, b"x"), 0, 0))
    with pytest.raises(CheckpointError, match=f"more than {MAX_PARTS}"):
        asyncio.run(memory.add(stream(1, b"x"), 0, 0))


def test_another_step_or_cut_than_was_asked_for_is_refused() -> None:
    for step, cut in [(1, 0), (0, 1)]:
        with pytest.raises(UnreachableError, match="asked for"):
            asyncio.run(PartMemory().add(stream(0), step, cut))


def test_what_was_announced_and_not_sent_is_not_memory_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = PartMemory()
    with pytest.raises(UnreachableError, match="only 0 of 1000"):
        asyncio.run(memory.add(stream(1000), 0, 0))
    assert os.fstat(memory.fds[0]).st_size == 0
    os.ftruncate(memory.fds[1], 1000)
    monkeypatch.setattr(moved_layers, "free_memory", lambda: 100)
    with pytest.raises(UnreachableError, match="more than the memory that is left"):
        asyncio.run(memory.add(stream(1000), 0, 0))
