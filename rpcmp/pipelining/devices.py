"""The devices of this host: their names, their memory, and the facts that decide rounding."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import torch

CPU = torch.device("cpu")


def host_facts(device: torch.device = CPU) -> dict[str, str]:
    """Return the facts that decide bits; equal bits need hosts that agree in all of them."""
    return {
        "torch": str(torch.__version__),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "device": str(device),
    }


def host_differences(reference: dict[str, str], hosts: dict[str, dict[str, str]]) -> list[str]:
    """Return how stages differ from the reference process, one sentence each."""
    return [
        f"{fact} is {theirs[fact]} at stage {stage!r} and {expected} in the reference"
        for stage, theirs in hosts.items()
        for fact, expected in reference.items()
        if theirs.get(fact) != expected
    ]


AUTO = "auto"
"""The config's name for CUDA if the host has it, else the CPU."""


def resolve_device(name: str) -> torch.device:
    """Return the device that a config's name stands for on this host; it may not exist.

    Raises:
        RuntimeError: torch knows no such device.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return a name for people, "NVIDIA H100" or "x86_64 AVX512".

    A CPU's name includes the instructions that torch uses, since others round differently.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def base_bytes(device: torch.device) -> int:
    """Return this process's peak memory on the CPU; 0 for other devices."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MemoryMeter:
    """Memory of a stage: resident memory on a CPU, memory allocated by torch on a GPU.

    Create it when the stage has been built and nothing has run.

    Attributes:
        idle: bytes at that time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.idle = self._now()

    def peak(self) -> int:
        """Return the most bytes until now."""
        is_gpu = self._device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self._device) if is_gpu else base_bytes(CPU)
        return max(self.idle, most)

    def free(self) -> int | None:
        """Return the bytes of the device that nobody uses; None if unknown."""
        available = available_bytes(self._device)
        return None if available is None else max(0, available - base_bytes(self._device))

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device and this process's own; None if unknown.

    The limit of the container, if it has one, is the most.
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
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []
