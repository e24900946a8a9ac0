"""Memory of the pretend accelerator that processes share, for rpcmp's tensors between devices.

It is the host's memory beside it, so that each process sees what the others have written. A copy
from or to it that the host does not wait for is made late, as every copy between streams may be.
"""

from __future__ import annotations

import mmap
import os

import pretend_accelerator  # type: ignore[import-not-found]  # it lies beside this file
import pretend_streams  # type: ignore[import-not-found]
import torch

from rpcmp.rpc import device_memory


class SharedAllocation:
    """A part of it; what other processes do is not known, nor is it freed for any stream.

    Attributes:
        accesses: the streams of this process that use it.
    """

    is_shared = True

    def __init__(self, storage: torch.UntypedStorage, accesses: object) -> None:
        self._storage = storage  # its address is not used again meanwhile
        self.accesses = accesses


class PretendMemory:
    """See `rpcmp.rpc.device_memory.DeviceMemory`."""

    def __init__(self, device: torch.device, host: mmap.mmap) -> None:
        self.device, self.handle = device, str(device).encode()
        self._host = host
        self._accesses: dict[int, object] = {}

    def part(self, start: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        raw = torch.frombuffer(self._host, dtype=torch.uint8, count=size, offset=start)
        index = pretend_accelerator.DEVICES.use(self.device)
        home = pretend_accelerator.DEVICES.stream(index)
        unused = pretend_streams.Accesses(home, pretend_streams.Work(home, 0))
        accesses = self._accesses.setdefault(start, unused)
        storage = raw.untyped_storage()
        allocation = SharedAllocation(storage, accesses)
        pretend_accelerator.ALLOCATIONS[storage._cdata] = allocation
        made: torch.Tensor = pretend_accelerator.PretendTensor(raw, index)
        return made


def _open(handle: bytes, host: mmap.mmap) -> PretendMemory:
    if os.environ.get("PRETEND_CLOSED"):
        raise RuntimeError("this device is closed")
    return PretendMemory(torch.device(handle.decode()), host)


def register() -> None:
    """Let rpcmp open it: an entry point of torch's, as the device itself has."""
    device_memory.KINDS[pretend_accelerator.NAME] = device_memory.MemoryKind(PretendMemory, _open)
