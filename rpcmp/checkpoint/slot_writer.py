"""Named tensors into shared memory, as the bytes of a safetensors file.

The library's own `save` builds these bytes in three copies. Here the header is made once and the
tensors are copied straight to their places, since a training step waits for it.

Format: https://huggingface.co/docs/safetensors: the header's length, 8 bytes little-endian; the
header, JSON, padded with spaces; the tensors, without holes. Ordered by size of their elements, all
are aligned.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rpcmp.checkpoint.slots import Slots, Snapshot

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_ROOM = 4096
"""Headers take multiples of this, so that a longer number in one does not move the tensors."""

Shapes = tuple[tuple[str, torch.dtype, torch.Size], ...]


class SnapshotWriter:
    """Writes snapshots of one stage into its slots.

    Args:
        slots: where to.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._layout = _Layout((), 0)
        self._mapped: dict[int, _Mapped] = {}

    def write(
        self, slot: int, step: int, tensors: Mapping[str, Tensor], about: str, pin: bool
    ) -> Snapshot:
        """Write a snapshot; returns when all is copied.

        Args:
            slot: from `Slots.begin`.
            step: the optimizer step after which the stage is like this.
            tensors: of any device, layout strided.
            about: the file's metadata under "rpcmp".
            pin: see Slots.

        Raises:
            TypeError: a dtype that the format does not have.
            OSError: there is no memory left.
        """
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        shapes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in ordered)
        metadata = json.dumps({"rpcmp": about})
        if shapes != self._layout.shapes or not self._layout.fits(metadata):
            self._layout = _Layout(shapes, len(metadata))
        memory = self._map(slot)
        memory.bytes[: self._layout.start] = self._layout.head(metadata)
        with torch.no_grad():
            for place, (_, tensor) in zip(memory.places, ordered, strict=True):
                place.copy_(tensor)
        return self._slots.commit(slot, step, self._layout.length, pin)

    def _map(self, slot: int) -> _Mapped:
        found = self._mapped.get(slot)
        if found is None or found.layout is not self._layout:
            self._mapped.pop(slot, None)
            os.ftruncate(self._slots.fd(slot), self._layout.length)
            memory = mmap.mmap(self._slots.fd(slot), self._layout.length)
            found = _Mapped(self._layout, memory, self._layout.places(memory))
            self._mapped[slot] = found
        return found


class _Mapped(NamedTuple):
    """A slot in this process's memory, and the tensors in it."""

    layout: _Layout
    bytes: mmap.mmap
    places: list[Tensor]


class _Layout:
    """Where in a file each tensor lies.

    Args:
        shapes: name, dtype and shape of each, in the order of the file.
        room: bytes of metadata to make room for.
    """

    def __init__(self, shapes: Shapes, room: int) -> None:
        self.shapes = shapes
        self._entries: list[tuple[int, int]] = []
        index = {}
        end = 0
        for name, dtype, shape in shapes:
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._entries.append((begin, end))
            index[name] = {
                "dtype": _dtype(name, dtype),
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        self._index = json.dumps(index)[1:]
        self.start = -(-(self._head_length(room)) // _ROOM) * _ROOM
        self.length = self.start + end

    def fits(self, metadata: str) -> bool:
        """Whether there is room for this metadata."""
        return self._head_length(len(metadata)) <= self.start

    def head(self, metadata: str) -> bytes:
        """The header with its length; json.dumps writes ASCII only."""
        comma = ", " if self.shapes else ""
        header = f'{{"__metadata__": {metadata}{comma}{self._index}'.encode()
        length = self.start - 8
        return length.to_bytes(8, "little") + header.ljust(length)

    def places(self, memory: mmap.mmap) -> list[Tensor]:
        """The tensors that lie in a slot's memory."""
        return [
            torch.frombuffer(
                memory, dtype=dtype, count=math.prod(shape), offset=self.start + begin
            ).reshape(shape)
            if end > begin
            else torch.empty(shape, dtype=dtype)
            for (_, dtype, shape), (begin, end) in zip(self.shapes, self._entries, strict=True)
        ]

    def _head_length(self, metadata: int) -> int:
        return 8 + len('{"__metadata__": , ') + metadata + len(self._index)


def require_storable(name: str, tensor: Tensor) -> None:
    """Check that a file can hold this tensor.

    Raises:
        TypeError: it has a dtype or a layout that the format does not have.
    """
    _dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name!r} is {tensor.layout}, which safetensors does not have")


def _dtype(name: str, dtype: torch.dtype) -> str:
    try:
        return DTYPES[dtype]
    except KeyError as error:
        raise TypeError(f"{name!r} is {dtype}, which safetensors does not have") from error
