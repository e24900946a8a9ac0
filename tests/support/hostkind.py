"""A kind of device memory for tests without a device: memory of the host, as `cpu`."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rpcmp.rpc.device_memory import KINDS, MemoryKind


class HostMemory:
    """See `rpcmp.rpc.device_memory.DeviceMemory`."""

    device = torch.device("cpu")

    def __init__(self, host: mmap.mmap, handle: bytes = b"of the host") -> None:
        self.handle = handle
        self._host = host

    def part(self, start: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._host, dtype=torch.uint8, count=size, offset=start)


@contextlib.contextmanager
def host_kind(handle: bytes = b"of the host") -> Iterator[list[bytes]]:
    """Let memory of `cpu` devices be shared in this block; yields the handles that were opened."""
    opened: list[bytes] = []

    def opening(found: bytes, host: mmap.mmap) -> HostMemory:
        opened.append(found)
        return HostMemory(host, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "cpu", MemoryKind(lambda _, host: HostMemory(host, handle), opening))
        yield opened
