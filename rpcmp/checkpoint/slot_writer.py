"""Write named tensors into shared memory, as the bytes of a safetensors file.

The library's own `save` builds these bytes in three copies. Here the header is made once and the
tensors are copied straight to their places, since a training step waits for it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rpcmp.checkpoint.safetensors_header import Header, TensorSpec, aligned
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
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._layout: _Layout | None = None
        self._mapped: dict[int, _MappedSlot] = {}

    def write(
        self, slot: int, step: int, tensors: Mapping[str, Tensor], about: str, pin: bool
    ) -> Snapshot:
        """Write a snapshot; returns when all is copied.

        Args:
            slot: from `Slots.begin`.
            step: the optimizer step after which the stage has this state.
            tensors: on any device, of layout strided.
            about: the file's metadata under "rpcmp".
            pin: keep it until it is saved; see Slots.

        Raises:
            TypeError: a dtype that the format does not have.
            OSError: there is no memory left.
        """
        shapes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        metadata = {"rpcmp": about}
        layout = self._layout
        if layout is None or layout.shapes != shapes:
            layout = _Layout(shapes)
        header = layout.header.encode(metadata, layout.start, _ROOM)
        if len(header) > layout.start:  # new, or the metadata has outgrown its room
            layout = _Layout(shapes, len(header))
        self._layout = layout
        memory = self._map(slot, layout)
        memory.bytes[: layout.start] = header
        with torch.no_grad():
            for name, place in memory.tensors.items():
                place.copy_(tensors[name])
        return self._slots.commit(slot, step, layout.length, pin)

    def _map(self, slot: int, layout: _Layout) -> _MappedSlot:
        mapped = self._mapped.get(slot)
        if mapped is None or mapped.layout is not layout:
            self._mapped.pop(slot, None)
            os.ftruncate(self._slots.fd(slot), layout.length)
            memory = mmap.mmap(self._slots.fd(slot), layout.length)
            mapped = self._mapped[slot] = _MappedSlot(layout, memory, layout.tensors_in(memory))
        return mapped


class _MappedSlot(NamedTuple):
    """A slot in this process's memory, and the tensors in it."""

    layout: _Layout
    bytes: mmap.mmap
    tensors: dict[str, Tensor]


class _Layout:
    """The place of each tensor in a slot.

    Args:
        start: bytes that the header takes.
    """

    def __init__(self, shapes: Shapes, start: int = 0) -> None:
        self.shapes = shapes
        self.start = start
        self._dtypes = {name: dtype for name, dtype, _ in shapes}
        self._specs = aligned(
            {
                name: TensorSpec(
                    _dtype(name, dtype), tuple(shape), math.prod(shape) * dtype.itemsize
                )
                for name, dtype, shape in shapes
            }
        )
        self.header = Header(self._specs)

    @property
    def length(self) -> int:
        return self.start + self.header.data_size

    def tensors_in(self, memory: mmap.mmap) -> dict[str, Tensor]:
        """Return the tensors that lie in a slot's memory, in the order of their bytes."""
        return {
            name: torch.frombuffer(
                memory, dtype=self._dtypes[name], count=spec.num_elements, offset=self.start + begin
            ).reshape(spec.shape)
            if spec.size
            else torch.empty(spec.shape, dtype=self._dtypes[name])
            for (name, spec), (begin, _) in zip(
                self._specs.items(), self.header.offsets, strict=True
            )
        }


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
