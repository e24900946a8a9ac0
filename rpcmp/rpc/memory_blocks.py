"""Blocks of memory that two processes of a host have mapped: where they lie, and which are free.

    memfd    | segment                        | segment    | a block that is larger |
             | block | block | block |        | block |    |                        |
    block    | header | data | gradient |

A block whose views are gone at all ends is used again for the next tensor of about its size, so the
memory holds what is in flight. With memory of a device, a segment has a twin there, of which blocks
are the same parts; its own pages are for the headers alone, and for how others open the twin.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import defaultdict, deque
from typing import NamedTuple

import torch

from rpcmp.errors import SecurityError
from rpcmp.process.memory_access import create_memory
from rpcmp.rpc.device_memory import KINDS, DeviceMemory

HEADER = 64
"""Bytes before the data, a cache line. Data and gradient begin at multiples of it."""

HAS_GRADIENT = 0
"""The first byte of the header: whether `give_gradient` had one. The others are marks, one for each
reader that may still look at the block."""

MAX_READERS = HEADER - 1

NOT_READ = bytes(MAX_READERS)

MIN_BLOCK = mmap.PAGESIZE

DEVICE_HEADER = MIN_BLOCK
"""Bytes before the data on a device: the header, and behind it how others open that memory."""

SEGMENT = 64 * 2**20
"""Bytes that are mapped at a time, or one block if that is larger: Python keeps a descriptor for
each map. Only pages that have been written to count as memory."""

DEVICE_SEGMENT = 4 * 2**20
"""The same on a device, where all of it counts."""

SIZES_PER_DOUBLING = 8
"""Sizes of blocks between a power of two and the next one: the rest of a block is lost."""

MOST_LARGER = 2
"""How many times as large as needed a free block may be that is used again."""


class MappedBlock(NamedTuple):
    """A block, as a part of what is mapped at once.

    Attributes:
        twin: memory of a device, of which the block is the same part.
    """

    memory: mmap.mmap
    start: int
    twin: DeviceMemory | None = None

    def buffer(self, capacity: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return an object that each view of the block keeps alive; finalizers may watch it."""
        return (ctypes.c_ubyte * capacity).from_buffer(self.memory, self.start)

    def mark(self, reader: int, value: int) -> None:
        self.memory[self.start + reader] = value

    @property
    def is_read(self) -> bool:
        return self.memory[self.start + 1 : self.start + HEADER] != NOT_READ


def aligned(size: int, step: int = HEADER) -> int:
    return -(-size // step) * step


def _block_size(needed: int, segment: int) -> int:
    """Return the bytes of a block for so many; one above a segment has whole segments."""
    step = (1 << (needed - 1).bit_length()) // (2 * SIZES_PER_DOUBLING)
    return aligned(needed, segment if needed > segment else max(MIN_BLOCK, step))


class OwnBlocks:
    """The blocks that this process lends to others. Thread-safe.

    Args:
        owner: name of this process.
        device: on which the data of blocks lie, of one of the KINDS; None: on the host.

    Attributes:
        address: where others of its host find them; see `rpcmp.process.memory_access`.
        size: bytes of all blocks.
        is_full: set where the device has no memory left: only free blocks are taken then.
        returned: offset and bytes of blocks of which this process has no view left. Finalizers,
            which may run in the middle of `take`, append to it and do no more.
    """

    def __init__(self, owner: str, device: torch.device | None) -> None:
        self.address = create_memory(owner)
        self.size = 0
        self.is_full = False
        self._fd = self.address.fd
        self._device = device
        self._lock = threading.Lock()
        self._unit = SEGMENT if device is None else DEVICE_SEGMENT
        self._end = self._next = self._length = 0
        self._segment: mmap.mmap | None = None
        self._twin: DeviceMemory | None = None
        self._regions: dict[int, MappedBlock] = {}
        self._unused: defaultdict[int, deque[int]] = defaultdict(deque)
        self.returned: deque[tuple[int, int]] = deque()

    def take(self, needed: int) -> tuple[int, int, MappedBlock]:
        """Return offset, bytes and memory of a block that nobody has a view of.

        Raises:
            torch.OutOfMemoryError: the device has none, and no memory left.
        """
        capacity = _block_size(needed, self._unit)
        with self._lock:
            while self.returned:
                offset, size = self.returned.popleft()
                self._unused[size].append(offset)
            for size in sorted(self._unused):
                if capacity <= size <= MOST_LARGER * capacity:
                    unused = self._unused[size]
                    for index, offset in enumerate(unused):  # the first ones have waited longest
                        if not self._regions[offset].is_read:
                            del unused[index]
                            return offset, size, self._regions[offset]
            offset = self._new_block(capacity)
            return offset, capacity, self._regions[offset]

    def _new_block(self, capacity: int) -> int:
        """Return the offset of a block in the current segment, or in a new one."""
        if self._segment is None or self._next + capacity > self._end:
            if self.is_full:  # each try would cost training all that its allocator caches
                raise torch.OutOfMemoryError(f"{self._device} had no memory left before")
            length = max(self._unit, capacity)
            if self._end + length > self._length:  # a refusal may have left a longer one
                self._length = self._end + length
                os.ftruncate(self._fd, self._length)
            segment = mmap.mmap(self._fd, length, offset=self._end)
            if self._device is not None:
                self._twin = KINDS[self._device.type].create(self._device, segment)
            self._segment = segment
            self._next, self._end = self._end, self._end + length
        offset, twin = self._next, self._twin
        start = offset - self._end + len(self._segment)
        self._regions[offset] = MappedBlock(self._segment, start, twin)
        if twin is not None:
            write_handle(self._regions[offset], twin.handle)
        self._next += capacity
        self.size += capacity
        return offset


class PeerMemory:
    """The memory of another process of this host, by its descriptor. Thread-safe.

    Args:
        kind: of the device on which its tensors lie; "": on the host.
    """

    def __init__(self, fd: int, kind: str = "") -> None:
        self._fd = fd
        self._kind = kind
        self._segments: dict[tuple[int, int], mmap.mmap] = {}
        self._twins: dict[tuple[int, int], DeviceMemory] = {}
        self._opening = threading.Lock()

    def region(self, offset: int, capacity: int) -> MappedBlock:
        """Return a block's memory.

        Raises:
            SecurityError: there is no such block.
            OSError: this process may map no more.
            RuntimeError: the device's memory cannot be opened.
        """
        # A block lies in one segment; a larger one is a segment of its own.
        unit = DEVICE_SEGMENT if self._kind else SEGMENT
        begin, length = offset // unit * unit, aligned(capacity, unit)
        is_inside = offset + capacity <= begin + length <= os.fstat(self._fd).st_size
        if not is_inside or offset % MIN_BLOCK or capacity < MIN_BLOCK:
            raise SecurityError(f"a message names memory that is no block, at byte {offset}")
        segment = self._segments.get((begin, length))
        if segment is None:
            segment = mmap.mmap(self._fd, length, offset=begin)
            segment = self._segments.setdefault((begin, length), segment)
        region = MappedBlock(segment, offset - begin)
        return region._replace(twin=self._twin(begin, region)) if self._kind else region

    def _twin(self, begin: int, region: MappedBlock) -> DeviceMemory:
        key = begin, len(region.memory)
        with self._opening:
            if key not in self._twins:
                self._twins[key] = KINDS[self._kind].open(read_handle(region), region.memory)
            return self._twins[key]


def write_handle(region: MappedBlock, handle: bytes) -> None:
    """Write behind a block's header how others open the memory of which it is a part.

    Raises:
        RuntimeError: the handle is too long.
    """
    if len(handle) >= DEVICE_HEADER - HEADER:
        raise RuntimeError(f"memory of a device has a handle of {len(handle)} bytes")
    start = region.start + HEADER
    region.memory[start : start + len(handle) + 1] = handle + b"\0"


def read_handle(region: MappedBlock) -> bytes:
    """Return what `write_handle` has written."""
    text = region.memory[region.start + HEADER : region.start + DEVICE_HEADER]
    return text.partition(b"\0")[0]
