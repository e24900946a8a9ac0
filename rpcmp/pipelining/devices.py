"""The devices of this host: which one a name stands for, and what they have.

What decides a host's bits: the same everywhere, or equal bits are not promised.
"""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import torch

CPU = torch.device("cpu")


def host_facts(device: torch.device = CPU) -> dict[str, str]:
    """Torch's version, the vector instructions it uses, the machine, its threads, the device.

    Args:
        device: where the process computes.
    """
    return {
        "torch": str(torch.__version__),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "device": str(device),
    }


def host_differences(reference: dict[str, str], hosts: dict[str, dict[str, str]]) -> list[str]:
    """Where stages differ from the reference, one sentence each.

    Args:
        reference: facts of the reference process.
        hosts: facts by stage name.
    """
    return [
        f"{fact} is {theirs[fact]} at stage {stage!r} and {expected} in the reference"
        for stage, theirs in hosts.items()
        for fact, expected in reference.items()
        if theirs.get(fact) != expected
    ]


AUTO = "auto"
"""In the place of a device: CUDA's where the host has one, else the CPU."""


def resolve_device(name: str) -> torch.device:
    """The device that a config's name stands for on this host; it may not exist.

    Raises:
        RuntimeError: torch knows no such device.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What a person would call it, "NVIDIA H100" or "x86_64 AVX512".

    Of a CPU also which instructions torch uses: another choice rounds differently.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


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
