"""Tensors between processes of one host: in memory that both have mapped, while RPC carries places.

    producer                        memfd of the producer                       reader
    place    ────────copies────> [ header | data | gradient ] <──────── attach, reads the data
    take_gradient  <──────────────────────── gradient  <──────────────────────── give_gradient
    the block is free again  <────────── a mark  <──────────── its last view of the block is gone

Through a socket, a tensor is copied into the kernel and out of it. Here it is written once where
its reader finds it, and so is its gradient. A small one costs less in its message.

A reader's supervisor opens the memory for it, see `rpcmp.process.memory_access`. Where it cannot,
because it is another host or user, torch RPC sends the tensors.

A block belongs to one tensor, see `memory_blocks`. Views of it count, not messages: a layer may
keep its input, and an optimizer a gradient, for as long as it likes.

With `[transfer] direct`, data and gradient may lie in memory of the producer's device, which the
reader has opened as well. Their places, headers and marks are as on the host. Nobody keeps views of
these: all is copied, see `copies`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import SecurityError, one_line
from rpcmp.rpc.memory_blocks import (
    DEVICE_HEADER,
    HAS_GRADIENT,
    HEADER,
    MAX_READERS,
    MappedBlock,
    OwnBlocks,
    PeerMemory,
    aligned,
)

WORTH_SHARING = 64 * 2**10
"""Bytes; a block takes some 0.2 ms of CPU at both ends, however many bytes it has."""

log = logging.getLogger(__name__)


class Sharing(IntEnum):
    """Which memory of another process a process can read; false if none."""

    NONE = 0
    HOST = 1
    DEVICE = 2


def is_worth_sharing(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors that a message has together cost less in shared memory."""
    return sum(each.numel() * each.element_size() for each in tensors) >= WORTH_SHARING


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
    _region: MappedBlock | None = field(default=None, repr=False)
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
        before = aligned(self.nbytes) if self.requires_grad else 0
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
            write(self._view(self.header + aligned(self.nbytes)), gradient)
        self._block[HAS_GRADIENT] = gradient is not None

    def take_gradient(self) -> Tensor | None:
        """Return what `give_gradient` has written, at the producer, without a copy."""
        if not self.requires_grad or not self._block[HAS_GRADIENT]:
            return None
        return self._view(self.header + aligned(self.nbytes))

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


def _give_back(region: MappedBlock, reader: int, pid: int) -> None:
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
        self._device = device
        self._blocks = OwnBlocks(owner, device)
        self.address = self._blocks.address
        self.on_host: OwnMemory | None = None
        self.never_returned: list[SharedTensor] = []

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self._blocks.size

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
            placed.offset, placed.capacity, region = self._blocks.take(placed.needed)
        except torch.OutOfMemoryError as error:
            if self.on_host is None:
                raise
            self._warn(error)
            return self.on_host.allocate(shape, dtype, requires_grad)
        placed._region, placed._block = region, region.buffer(placed.capacity)
        placed._block[HAS_GRADIENT] = 0
        weakref.finalize(
            placed._block, self._blocks.returned.append, (placed.offset, placed.capacity)
        )
        return placed

    def _warn(self, error: torch.OutOfMemoryError) -> None:
        """Say once that tensors may lie on the host from now on."""
        if not self._blocks.is_full:
            self._blocks.is_full = True
            log.warning(
                "[transfer] direct: %s has no memory left for tensors on their way to others, so "
                "some pass through memory of the host from now on: %s",
                self._device,
                one_line(error),
            )
