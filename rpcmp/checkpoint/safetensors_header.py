"""Read and write the header of a safetensors file, to copy tensors without parsing them.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header,
little-endian; the header, JSON padded with spaces; the tensors' bytes, one after the other without
holes up to the end of the file. Offsets count from the end of the header.

The library's own `safe_open` (0.8) cannot take the place of `read`: it does not give byte offsets;
it maps the file, so a process that shares the memory of a snapshot can kill the reader by cutting
it off (SIGBUS); it accepts a header that has a name twice; and it parses headers of up to 100 MB,
one of 44 MB into 540 MB of memory. Its `serialize` copies all tensors, which a training step would
wait for. Files that this user names are read with it, see `stage_state` and `pipelining.layers`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import Field, ValidationError

from rpcmp.checkpoint.files import BLOCK
from rpcmp.config.types import Strict
from rpcmp.errors import CheckpointError

METADATA = "__metadata__"

ALIGNMENT = 8
"""A header's length is a multiple of this many bytes."""

MAX_HEADER = 2**25
"""Bytes of the longest header that is read, enough for 200,000 tensors; parsed, it takes 20 times
as much memory."""

Count = Annotated[int, Field(ge=0)]


class _TensorEntry(Strict):
    dtype: str
    shape: list[Count]
    data_offsets: list[Count] = Field(min_length=2, max_length=2)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a header describes it: `dtype` is such as "F32", `size` is in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_size(self) -> float:
        """Bytes per element; infinite for empty tensors, and below one in packed formats."""
        return self.size / self.num_elements if self.num_elements else math.inf


@dataclass(frozen=True)
class TensorRange(TensorSpec):
    """A tensor in a file; `begin` is the offset of its first byte in the file."""

    begin: int


Spec = TypeVar("Spec", bound=TensorSpec)


class Header:
    """The header of a file that holds `tensors` one after the other, in their order.

    Attributes:
        offsets: first byte of each tensor and the one after its last, from the end of the header.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.offsets: list[tuple[int, int]] = []
        entries = {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.size
            self.offsets.append((begin, end))
            entries[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        self._entries = _compact(entries)[1:-1]
        self.data_size = end

    def encode(
        self, metadata: Mapping[str, str], min_size: int = 0, multiple: int = ALIGNMENT
    ) -> bytes:
        """Return what the file starts with, its length included.

        Args:
            min_size: bytes to pad to.
            multiple: pad a longer header to a multiple of this; itself a multiple of ALIGNMENT.
        """
        members = [f'"{METADATA}":{_compact(metadata)}', *filter(None, [self._entries])]
        text = f"{{{','.join(members)}}}".encode()
        size = max(min_size, -(-(8 + len(text)) // multiple) * multiple)
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def aligned(tensors: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return `tensors` in an order in which each lies at a multiple of its element size.

    The format forbids padding, and torch cannot view a float32 at an odd address, as a loader that
    maps the file would: the widest elements come first. Otherwise, the order stays.
    """
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size))


def read_ranges(file: BinaryIO, source: object) -> dict[str, TensorRange]:
    """Return the place of each tensor in a safetensors file, in the order of their bytes.

    Raises CheckpointError if it is not such a file, and OSError if it cannot be read.
    """
    try:
        entries, begin, end = _read_header(file.fileno())
        ranges = {
            name: _range(_TensorEntry.model_validate(entry), begin)
            for name, entry in entries.items()
            if name != METADATA
        }
        ordered = dict(sorted(ranges.items(), key=lambda item: (item[1].begin, item[1].size)))
        _require_no_holes(list(ordered.values()), begin, end)
    except (ValueError, RecursionError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{source} is not a safetensors file: {what}") from error
    return ordered


def read_metadata(fd: int) -> Mapping[str, Any]:
    """Return the metadata of an open file, which may be memory that another process can cut off.

    Raises ValueError if it is not a safetensors file, and LookupError if it has no metadata.
    """
    metadata = _read_header(fd)[0][METADATA]
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a JSON object")
    return metadata


def blocks(file: BinaryIO, tensor: TensorRange, source: object) -> Iterator[bytes]:
    try:
        file.seek(tensor.begin)
        left = tensor.size
        while left:
            block = file.read(min(left, BLOCK))
            if not block:
                raise CheckpointError(f"{source} was cut off while it was read")
            left -= len(block)
            yield block
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from error


def _read_header(fd: int) -> tuple[dict[str, Any], int, int]:
    """Return the header's entries, where the tensors' bytes start, and where the file ends."""
    end = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER or 8 + length > end:
        raise ValueError(f"its header has {length} bytes, of a file of {end}")
    entries = json.loads(os.pread(fd, length, 8), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    return entries, 8 + length, end


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"it has {key!r} twice")
        unique[key] = value
    return unique


def _range(entry: _TensorEntry, begin: int) -> TensorRange:
    first, last = entry.data_offsets
    if last < first:
        raise ValueError("a tensor ends before it begins")
    return TensorRange(entry.dtype, tuple(entry.shape), last - first, begin + first)


def _require_no_holes(ranges: list[TensorRange], begin: int, end: int) -> None:
    ends = [begin, *(one.begin + one.size for one in ranges)]
    begins = [*(one.begin for one in ranges), end]
    if ends != begins:
        raise ValueError("its tensors do not fill it")
