"""Tensors between processes of one host: in memory that both have mapped, while RPC carries places.

    producer                        memfd of the producer                       reader
    place    ────────copies────> [ header | data | gradient ] <──────── attach, reads the data
    take_gradient  <──────────────────────── gradient  <──────────────────────── give_gradient
    the block is free again  <────────── a mark  <──────────── its last view of the block is gone

Through a socket, a tensor is copied into the kernel and out of it. Here it is written once where
its reader finds it, and so is its gradient. A small one costs less in its message.

A reader's supervisor opens the memory for it, see `rpcmp.process.memory_access`. Where it cannot,
because it is another host or user, torch RPC sends the tensors.

A block belongs to one tensor. Views of it count, not messages: a layer may keep its input, and an
optimizer a gradient, for as long as it likes. A block whose views are gone at all ends is used
again for the next tensor of about its size, so the memory holds what is in flight.

With `[transfer] direct`, data and gradient may lie in memory of the producer's device, which the
reader has opened as well. Their places, headers and marks are as on the host, whose memory has
pages for the headers alone. Nobody keeps views of these: all is copied, see `copies`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpcmp.errors import SecurityError, one_line
from rpcmp.process.memory_access import create_memory
from rpcmp.rpc.device_memory import KINDS, DeviceMemory

HEADER = 64
"""Bytes before the data, a cache line. Data and gradient begin at multiples of it."""

HAS_GRADIENT = 0
"""The first byte of the header: whether `give_gradient` had one. The others are marks, one for each
reader that may still look at the block."""

MAX_READERS = HEADER - 1

NOT_READ = bytes(MAX_READERS)

WORTH_SHARING = 64 * 2**10
"""Bytes; a block takes some 0.2 ms of CPU at both ends, however many bytes it has."""

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

log = logging.getLogger(__name__)


class Sharing(IntEnum):
    """Which memory of another process a process can read; false if none."""

    NONE = 0
    HOST = 1
    DEVICE = 2


class Region(NamedTuple):
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


def is_worth_sharing(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors that a message has together cost less in shared memory."""
    return sum(each.numel() * each.element_size() for each in tensors) >= WORTH_SHARING


def _aligned(size: int, step: int = HEADER) -> int:
    return -(-size // step) * step


def _block_size(needed: int, segment: int) -> int:
    """Return the bytes of a block for so many; one above a segment has whole segments."""
    step = (1 << (needed - 1).bit_length()) // (2 * SIZES_PER_DOUBLING)
    return _aligned(needed, segment if needed > segment else max(MIN_BLOCK, step))


@dataclass(eq=False)
class SharedTensor:
    """A dense, contiguous tensor in a block.

    The producer's own has no reader; what it lends is what a message carries.

    Attributes:
        offset, capacity: the block, in bytes.
        requires_grad: whether it has room for a gradient, of the same dtype and shape.
        start: bytes of the block's data before it.
        reader: from 1, among those to whom the block was lent.
        on_device: whether it lies on the producer's device.
    """

    offset: int
    capacity: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False
    start: int = 0
    reader: int = 0
    on_device: bool = False
    _block: Any = field(default=None, repr=False)
    _region: Region | None = field(default=None, repr=False)
    _readers: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = (self.dtype, self.shape, self.requires_grad)
        place = (self.start, self.reader, self.on_device)
        return SharedTensor, (self.offset, self.capacity, *tensor, *place)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def needed(self) -> int:
        """Bytes of a block up to its end, or that of its gradient."""
        before = _aligned(self.nbytes) if self.requires_grad else 0
        return self.header + self.start + before + self.nbytes

    @property
    def header(self) -> int:
        return DEVICE_HEADER if self.on_device else HEADER

    @property
    def tensor(self) -> Tensor:
        """The data, without a copy."""
        return self._view(self.header + self.start)

    def lend(self, elements: slice | None = None) -> SharedTensor | Tensor:
        """Return it for one more reader, as part of a message that is sent for certain.

        Several threads may lend it at once.

        Args:
            elements: of a flat tensor, those that the reader gets; None: all.

        Returns:
            A copy of the tensor instead if it has MAX_READERS.
        """
        lent = dataclasses.replace(self, reader=next(self._readers))
        if elements is not None:
            first, last, _ = elements.indices(*self.shape)
            lent.start = self.start + first * self.dtype.itemsize
            lent.shape = (last - first,)
        if lent.reader > MAX_READERS:
            return lent.tensor.to("cpu", copy=True)
        self._block[lent.reader] = 1
        return lent

    def attach(self, memory: PeerMemory) -> None:
        """Find it at its reader; when all views of it are gone, the block is the producer's again.

        Raises:
            SecurityError: it lies outside of the memory, or of its block.
        """
        numbers = self.offset, self.capacity, self.start, self.reader, *self.shape
        if any(type(number) is not int or number < 0 for number in numbers):
            raise SecurityError("a message names memory by what is no number")
        flags = type(self.requires_grad), type(self.on_device)
        if not isinstance(self.dtype, torch.dtype) or flags != (bool, bool):
            raise SecurityError("a message names a tensor in memory without its type")
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise SecurityError("a message names a gradient of integers")
        if self.start % self.dtype.itemsize:
            raise SecurityError("a message names a tensor between two numbers")
        if self.needed > self.capacity or not 1 <= self.reader <= MAX_READERS:
            raise SecurityError(f"a tensor of {self.needed} bytes in a block of {self.capacity}")
        region = self._region = memory.region(self.offset, self.capacity)
        if self.on_device is not (region.twin is not None):
            raise SecurityError("a message names memory of a device that is the host's")
        self._block = region.buffer(self.capacity)
        weakref.finalize(self._block, _give_back, region, self.reader, os.getpid())

    def give_gradient(
        self, gradient: Tensor | None, write: Callable[[Tensor, Tensor], object] = Tensor.copy_
    ) -> None:
        """Write its gradient, at the reader.

        Args:
            write: copies the gradient to where the producer finds it, at the latest before that is
                told.
        """
        if gradient is not None:
            write(self._view(self.header + _aligned(self.nbytes)), gradient)
        self._block[HAS_GRADIENT] = gradient is not None

    def take_gradient(self) -> Tensor | None:
        """Return what `give_gradient` has written, at the producer, without a copy."""
        if not self.requires_grad or not self._block[HAS_GRADIENT]:
            return None
        return self._view(self.header + _aligned(self.nbytes))

    def _view(self, offset: int) -> Tensor:
        size = math.prod(self.shape)
        if self.on_device:
            return self._view_on_device(offset)
        if not size:  # which `frombuffer` refuses
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self._block, dtype=self.dtype, count=size, offset=offset)
        return flat.view(self.shape)

    def _view_on_device(self, offset: int) -> Tensor:
        """Return a view that keeps the block as long as this very object lives."""
        assert self._region is not None
        assert self._region.twin is not None
        flat = self._region.twin.part(self._region.start + offset, self.nbytes)
        view = flat.view(self.dtype).view(self.shape)
        view._block = self._block  # type: ignore[attr-defined]
        return view


def _give_back(region: Region, reader: int, pid: int) -> None:
    """Tell the producer that a reader has no view left; a fork of the reader has no say in it."""
    if os.getpid() == pid:
        region.mark(reader, 0)


class OwnMemory:
    """What this process has placed for others. Thread-safe.

    Args:
        owner: name of this process.
        device: on which it places tensors, of one of the KINDS; None: on the host.

    Attributes:
        address: where others of its host find it; see `rpcmp.process.memory_access`.
        on_host: where it places tensors for which the device has no memory left; None: nowhere.
        never_returned: what is kept as long as this object is.
    """

    def __init__(self, owner: str = "", device: torch.device | None = None) -> None:
        self.address = create_memory(owner)
        self.on_host: OwnMemory | None = None
        self.never_returned: list[SharedTensor] = []
        self._fd = self.address.fd
        self._device = device
        self._lock = threading.Lock()
        self._unit = SEGMENT if device is None else DEVICE_SEGMENT
        self._size = self._end = self._next = self._length = 0
        self._is_full = False
        self._segment: mmap.mmap | None = None
        self._twin: DeviceMemory | None = None
        self._regions: dict[int, Region] = {}
        self._unused: defaultdict[int, deque[int]] = defaultdict(deque)
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self._size

    def place(
        self, tensor: Tensor, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> SharedTensor:
        """Copy a tensor, on any device, to a block.

        Args:
            dtype: of the copy; None: that of `tensor`.
        """
        placed = self.allocate(tuple(tensor.shape), dtype or tensor.dtype, requires_grad)
        placed.tensor.copy_(tensor.detach())
        return placed

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False
    ) -> SharedTensor:
        """Return a tensor in a block, as `torch.empty` does.

        Raises:
            torch.OutOfMemoryError: the device has too little memory, and there is no `on_host`.
        """
        is_on_device = self._device is not None
        placed = SharedTensor(0, 0, dtype, shape, requires_grad, on_device=is_on_device)
        try:
            placed.offset, placed.capacity = self._take(_block_size(placed.needed, self._unit))
        except torch.OutOfMemoryError as error:
            if self.on_host is None:
                raise
            self._warn(error)
            return self.on_host.allocate(shape, dtype, requires_grad)
        region = placed._region = self._regions[placed.offset]
        placed._block = region.buffer(placed.capacity)
        placed._block[HAS_GRADIENT] = 0
        # A finalizer may run in the middle of `_take`, so it does no more than this.
        weakref.finalize(placed._block, self._returned.append, (placed.capacity, placed.offset))
        return placed

    def _warn(self, error: torch.OutOfMemoryError) -> None:
        """Say once that tensors may lie on the host from now on."""
        if not self._is_full:
            self._is_full = True
            log.warning(
                "[transfer] direct: %s has no memory left for tensors on their way to others, so "
                "some pass through memory of the host from now on: %s",
                self._device,
                one_line(error),
            )

    def _take(self, capacity: int) -> tuple[int, int]:
        """Return offset and bytes of a block that nobody has a view of, or of a new one."""
        with self._lock:
            while self._returned:
                size, offset = self._returned.popleft()
                self._unused[size].append(offset)
            for size in sorted(self._unused):
                if capacity <= size <= MOST_LARGER * capacity:
                    unused = self._unused[size]
                    for index, offset in enumerate(unused):  # the first ones have waited longest
                        if not self._regions[offset].is_read:
                            del unused[index]
                            return offset, size
            return self._new_block(capacity), capacity

    def _new_block(self, capacity: int) -> int:
        """Return the offset of a block in the current segment, or in a new one."""
        if self._segment is None or self._next + capacity > self._end:
            if self._is_full:  # each try would cost training all that its allocator caches
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
        self._regions[offset] = Region(self._segment, start, twin)
        if twin is not None:
            write_handle(self._regions[offset], twin.handle)
        self._next += capacity
        self._size += capacity
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

    def region(self, offset: int, capacity: int) -> Region:
        """Return a block's memory.

        Raises:
            SecurityError: there is no such block.
            OSError: this process may map no more.
            RuntimeError: the device's memory cannot be opened.
        """
        # A block lies in one segment; a larger one is a segment of its own.
        unit = DEVICE_SEGMENT if self._kind else SEGMENT
        begin, length = offset // unit * unit, _aligned(capacity, unit)
        is_inside = offset + capacity <= begin + length <= os.fstat(self._fd).st_size
        if not is_inside or offset % MIN_BLOCK or capacity < MIN_BLOCK:
            raise SecurityError(f"a message names memory that is no block, at byte {offset}")
        segment = self._segments.get((begin, length))
        if segment is None:
            segment = mmap.mmap(self._fd, length, offset=begin)
            segment = self._segments.setdefault((begin, length), segment)
        region = Region(segment, offset - begin)
        return region._replace(twin=self._twin(begin, region)) if self._kind else region

    def _twin(self, begin: int, region: Region) -> DeviceMemory:
        key = begin, len(region.memory)
        with self._opening:
            if key not in self._twins:
                self._twins[key] = KINDS[self._kind].open(read_handle(region), region.memory)
            return self._twins[key]


def write_handle(region: Region, handle: bytes) -> None:
    """Write behind a block's header how others open the memory of which it is a part.

    Raises:
        RuntimeError: the handle is too long.
    """
    if len(handle) >= DEVICE_HEADER - HEADER:
        raise RuntimeError(f"memory of a device has a handle of {len(handle)} bytes")
    start = region.start + HEADER
    region.memory[start : start + len(handle) + 1] = handle + b"\0"


def read_handle(region: Region) -> bytes:
    """Return what `write_handle` has written."""
    text = region.memory[region.start + HEADER : region.start + DEVICE_HEADER]
    return text.partition(b"\0")[0]
