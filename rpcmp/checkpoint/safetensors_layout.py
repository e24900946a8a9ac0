"""Where the tensors lie in a safetensors file, so that they can be copied without being read.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header,
little-endian; the header, JSON padded with spaces; the tensors' bytes, one after the other without
holes up to the end of the file. Offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

from pydantic import Field, ValidationError

from rpcmp.checkpoint.files import BLOCK
from rpcmp.config.types import Strict
from rpcmp.errors import CheckpointError

METADATA = "__metadata__"

ALIGNMENT = 8
"""Bytes whose multiple the length of a header is."""

MAX_HEADER = 2**25
"""Bytes of the longest header that is read, of 200,000 tensors; parsed, 20 times as much."""

Count = Annotated[int, Field(ge=0)]


class _Entry(Strict):
    """A tensor in the header."""

    dtype: str
    shape: list[Count]
    data_offsets: list[Count] = Field(min_length=2, max_length=2)


@dataclass(frozen=True)
class TensorRange:
    """A tensor in a file.

    Attributes:
        dtype: as the format names it, "F32".
        shape: its sizes.
        begin: where its first byte lies in the file.
        size: its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def element_size(self) -> float:
        """Bytes of a number; infinite where there is none, and below one in packed formats."""
        return self.size / self.num_elements if self.num_elements else math.inf


def read(file: BinaryIO, source: object) -> dict[str, TensorRange]:
    """Where each tensor lies in `file`, in the order of their bytes.

    Args:
        file: a safetensors file.
        source: its place, for messages.

    Raises:
        CheckpointError: it is no safetensors file.
        OSError: it cannot be read.
    """
    end = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    try:
        if length > MAX_HEADER or begin > end:
            raise ValueError("its header does not fit")
        entries = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        ranges = {
            name: _range(_Entry.model_validate(entry), begin)
            for name, entry in entries.items()
            if name != METADATA
        }
        ordered = dict(sorted(ranges.items(), key=lambda item: (item[1].begin, item[1].size)))
        _require_no_holes(list(ordered.values()), begin, end)
    except (ValueError, RecursionError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{source} is no safetensors file: {what}") from error
    return ordered


def header(tensors: Mapping[str, TensorRange], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with that holds the bytes of `tensors`, one after the other."""
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset := offset + tensor.size]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def aligned(tensors: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """`tensors` in an order in which each lies at a multiple of its element size.

    The format has no holes to fill up with, and torch cannot view a float32 at an odd address, as a
    loader that maps the file would: the widest numbers come first. Otherwise, the order stays.
    """
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size))


def blocks(file: BinaryIO, tensor: TensorRange, source: object) -> Iterator[bytes]:
    """The bytes of a tensor, a block at a time.

    Raises:
        CheckpointError: they cannot be read.
    """
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {key!r} twice")
        found[key] = value
    return found


def _range(entry: _Entry, begin: int) -> TensorRange:
    first, last = entry.data_offsets
    if last < first:
        raise ValueError("a tensor ends before it begins")
    return TensorRange(entry.dtype, tuple(entry.shape), begin + first, last - first)


def _require_no_holes(ranges: list[TensorRange], begin: int, end: int) -> None:
    ends = [begin, *(one.begin + one.size for one in ranges)]
    begins = [*(one.begin for one in ranges), end]
    if ends != begins:
        raise ValueError("its tensors do not fill it")
