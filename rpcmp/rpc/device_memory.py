"""Memory of an accelerator that two processes of one host see: the kinds that can be opened.

    owner    create ── the device's memory ── handle ────> the device's memory ── open    reader

CUDA's and ROCm's is opened by the handles of `torch.multiprocessing`, which says when that works:
on Linux, where both processes see the device, and not through every container. So nobody relies on
it: a reader tries it first, see `device_trial`. A handle is the word of a process of the same user
and job. What it says is checked where that is possible, but nobody can tell whose memory it opens:
with `[transfer] direct` the members of one host trust each other.
"""

from __future__ import annotations

import inspect
import json
import mmap
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rpcmp.errors import SecurityError

HANDLE_FIELDS: dict[str, type] = {
    "storage_handle": bytes,
    "storage_size_bytes": int,
    "storage_offset_bytes": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}
"""What torch tells a reader of the memory of CUDA; the rest is known."""


MOST_COUNTERS = 10_000
"""Reference counts in a file of torch's, of which a handle names one."""

COUNTER_FILE = re.compile(rb"/torch_[0-9a-z_]{1,64}", re.IGNORECASE)


class DeviceMemory(Protocol):
    """A piece of a device's memory, in the process that owns it or in another one.

    Attributes:
        handle: by which others open it.
        device: by the name of this process.
    """

    handle: bytes
    device: torch.device

    def part(self, start: int, size: int) -> Tensor:
        """Return some of its bytes as uint8, without a copy."""


class MemoryKind(NamedTuple):
    """How memory of a kind of device is made and opened, beside as much memory of the host.

    Both raise RuntimeError if the device or its driver refuses. That of the host is shared as well,
    and what lies on the device leaves it unused.

    Attributes:
        create: of a device, as many bytes as the host's has.
        open: of a handle.
    """

    create: Callable[[torch.device, mmap.mmap], DeviceMemory]
    open: Callable[[bytes, mmap.mmap], DeviceMemory]


class CudaMemory:
    """Memory of CUDA or ROCm."""

    def __init__(self, memory: Tensor, handle: bytes) -> None:
        self.handle = handle
        self.device = memory.device
        self._memory = memory

    def part(self, start: int, size: int) -> Tensor:
        return self._memory[start : start + size]

    @classmethod
    def create(cls, device: torch.device, host: mmap.mmap) -> CudaMemory:
        memory = torch.empty(len(host), dtype=torch.uint8, device=device)
        function, arguments = reductions.reduce_tensor(memory)
        named = dict(zip(inspect.signature(function).parameters, arguments, strict=True))
        fields = {name: named[name] for name in HANDLE_FIELDS}
        texts = {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}
        return cls(memory, json.dumps({"uuid": _uuid(device), **texts}).encode())

    @classmethod
    def open(cls, handle: bytes, host: mmap.mmap) -> CudaMemory:
        fields = _parsed(handle)
        if fields["storage_size_bytes"] < len(host):
            raise SecurityError("memory of a device that is smaller than it says")
        counter, offset = fields["ref_counter_handle"], fields["ref_counter_offset"]
        is_counter = COUNTER_FILE.fullmatch(counter) and 0 <= offset < MOST_COUNTERS
        if not is_counter or fields["storage_offset_bytes"] < 0:
            raise SecurityError("a handle of a device's memory that leads outside of it")
        memory: Tensor = reductions.rebuild_cuda_tensor(
            tensor_cls=torch.Tensor,
            tensor_size=(len(host),),
            tensor_stride=(1,),
            tensor_offset=0,
            storage_cls=torch.UntypedStorage,
            dtype=torch.uint8,
            storage_device=_index_of(fields.pop("uuid")),
            requires_grad=False,
            **fields,
        )
        return cls(memory, handle)


def _parsed(handle: bytes) -> dict[str, Any]:
    """Return the fields of a handle of CUDA, each of its type; raises SecurityError."""
    kinds = {"uuid": str, **HANDLE_FIELDS}
    try:
        found = json.loads(handle)
        fields = {
            name: bytes.fromhex(found[name]) if kind is bytes else found[name]
            for name, kind in kinds.items()
        }
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise SecurityError("a handle of a device's memory that nobody can read") from error
    if any(type(fields[name]) is not kind for name, kind in kinds.items()):
        raise SecurityError("a handle of a device's memory with fields of other types")
    return fields


def _uuid(device: torch.device | int) -> str:
    """Return what names a device in all processes; its index depends on those that one sees."""
    return str(torch.get_device_module("cuda").get_device_properties(device).uuid)


def _index_of(uuid: str) -> int:
    """Return this process's index of a device."""
    for index in range(torch.get_device_module("cuda").device_count()):
        if _uuid(index) == uuid:
            return index
    raise RuntimeError(f"the device {uuid} is not visible here")


KINDS: dict[str, MemoryKind] = {"cuda": MemoryKind(CudaMemory.create, CudaMemory.open)}
"""By the type of the device; others can be added, as our tests do."""
