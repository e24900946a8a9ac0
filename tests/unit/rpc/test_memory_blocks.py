"""Blocks: how large they are, which are taken again, and where a segment ends."""

from __future__ import annotations

import mmap

import pytest
import torch

from rpcmp.errors import SecurityError
from rpcmp.rpc.device_memory import KINDS, DeviceMemory
from rpcmp.rpc.memory_blocks import (
    DEVICE_SEGMENT,
    MIN_BLOCK,
    SEGMENT,
    OwnBlocks,
    PeerMemory,
    read_handle,
    write_handle,
)
from tests.support.hostkind import host_kind

SIZES = (1, 4096, 5000, 70_000, 10**6, DEVICE_SEGMENT, 2**24 + 1, SEGMENT - 64, SEGMENT)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_little_larger_than_what_it_holds(size: int) -> None:
    _, capacity, _ = OwnBlocks("", None).take(size)
    assert 0 <= capacity - size < max(MIN_BLOCK, size / 8)


@pytest.mark.parametrize("size", [SEGMENT + 1, 3 * SEGMENT - 5])
def test_a_large_block_is_a_segment_of_its_own(size: int) -> None:
    blocks = OwnBlocks("", None)
    blocks.take(100)
    offset, capacity, region = blocks.take(size)
    assert offset % SEGMENT == capacity % SEGMENT == 0
    assert len(region.memory) == capacity
    peer = PeerMemory(blocks.address.fd)
    assert peer.region(offset, capacity).start == 0
    with pytest.raises(SecurityError, match="no block"):
        peer.region(offset, capacity + SEGMENT)


@pytest.mark.parametrize("size", [DEVICE_SEGMENT + 1, 2**24 + 1, SEGMENT + 1])
def test_a_device_has_no_segments_of_the_hosts_size(size: int) -> None:
    created: list[int] = []
    with host_kind(), pytest.MonkeyPatch.context() as patch:
        create = KINDS["cpu"].create

        def counting(device: torch.device, host: mmap.mmap) -> DeviceMemory:
            created.append(len(host))
            return create(device, host)

        patch.setitem(KINDS, "cpu", KINDS["cpu"]._replace(create=counting))
        OwnBlocks("", torch.device("cpu")).take(size)
    assert size <= created[0] < size + DEVICE_SEGMENT


def test_a_free_block_is_taken_for_what_is_not_much_smaller() -> None:
    blocks = OwnBlocks("", None)
    offset, capacity, _ = blocks.take(100_000)
    blocks.returned.append((offset, capacity))
    assert blocks.take(60_000)[:2] == (offset, capacity)
    blocks.returned.append((offset, capacity))
    assert blocks.take(10_000)[0] != offset
    assert blocks.take(capacity + 1)[0] != offset


def test_a_block_that_somebody_reads_is_not_taken() -> None:
    blocks = OwnBlocks("", None)
    offset, capacity, region = blocks.take(100)
    region.mark(1, 1)
    blocks.returned.append((offset, capacity))
    other = blocks.take(100)
    assert other[0] != offset
    region.mark(1, 0)
    assert blocks.take(100)[0] == offset


def test_a_full_device_has_only_its_free_blocks() -> None:
    with host_kind():
        blocks = OwnBlocks("", torch.device("cpu"))
        offset, capacity, _ = blocks.take(100)
        blocks.is_full = True
        blocks.returned.append((offset, capacity))
        assert blocks.take(100)[0] == offset
        assert blocks.take(100)[0] != offset  # of the segment that there is
        with pytest.raises(torch.OutOfMemoryError):
            blocks.take(DEVICE_SEGMENT + 1)


def test_a_block_says_how_others_open_its_device() -> None:
    _, _, region = OwnBlocks("", None).take(8000)
    write_handle(region, b"the handle")
    assert read_handle(region) == b"the handle"
    with pytest.raises(RuntimeError, match="a handle of 5000 bytes"):
        write_handle(region, b"x" * 5000)
