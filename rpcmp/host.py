"""What decides a host's bits: the same everywhere, or equal bits are not promised."""

from __future__ import annotations

import platform

import torch

CPU = torch.device("cpu")


def facts(device: torch.device = CPU) -> dict[str, str]:
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


def differences(reference: dict[str, str], hosts: dict[str, dict[str, str]]) -> list[str]:
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
