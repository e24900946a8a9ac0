"""Bytes: of what a layer keeps, and of what its host has."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


class Storages:
    """The memory of tensors, counted once where several share it."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._sizes: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    @property
    def num_bytes(self) -> int:
        """Of all of them together."""
        return sum(self._sizes.values())

    def add(self, tensor: Tensor) -> None:
        """Count one more; its memory must not be freed and used again as long as this counts."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()

    def without(self, others: Storages) -> int:
        """Bytes that none of `others` has."""
        own = self._sizes.items()
        return sum(size for pointer, size in own if pointer not in others._sizes)


def base_bytes(device: torch.device) -> int:
    """What this process takes up on the device by itself; its host's memory for the CPU."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes(device: torch.device) -> int | None:
    """What is free on the device, with what this process takes up; None where nobody knows.

    In a container that has a limit of its own, not more than that.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([free * 1024 + base_bytes(device), *_container_limit()])


def _container_limit() -> list[int]:
    """The control group's limit, where there is one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []
