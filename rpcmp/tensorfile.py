"""Named tensors in a file and in shared memory, both in the safetensors format: never pickle."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `tensors` to `path`."""
    safetensors.torch.save_file(_independent(tensors), path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors that `save_tensors` wrote."""
    return safetensors.torch.load_file(path)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """What `save_tensors` would write."""
    data: bytes = safetensors.torch.save(_independent(tensors))
    return data


def from_bytes(data: bytes) -> dict[str, Tensor]:
    """The tensors that `to_bytes` was given."""
    return safetensors.torch.load(data)


def to_memory(tensors: Mapping[str, Tensor]) -> int:
    """The file descriptor of anonymous shared memory that holds `tensors`; the caller closes it.

    A memfd counts towards the processes' memory and needs no room in /dev/shm.
    """
    data = to_bytes(tensors)
    fd = os.memfd_create("rpcmp-tensors")
    with open(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def from_memory(fd: int) -> dict[str, Tensor]:
    """Copies of the tensors in shared memory; closes `fd`."""
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            return safetensors.torch.load(memory[:])
    finally:
        os.close(fd)


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host copies: safetensors refuses tensors that share memory, as tied weights do."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
