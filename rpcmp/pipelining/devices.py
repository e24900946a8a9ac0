"""The devices of this host: their names, their memory, and the facts that decide rounding."""

from __future__ import annotations

import functools
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rpcmp.config import device_places
from rpcmp.config.device_places import AUTO
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError

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


def is_current(device: torch.device) -> bool:
    """Return whether `torch.accelerator` answers for this kind of device; it raises for others.

    It has one kind per process, without a driver as well: the one that torch is built for, such as
    CUDA, or a vendor's if that is registered. CUDA's devices work beside a vendor's.
    """
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def _module(device: torch.device) -> ModuleType | None:
    """Return torch's module of a kind of device, such as `torch.cuda`; None of one without any."""
    try:
        module: ModuleType = torch.get_device_module(device)
    except RuntimeError:  # such as meta, or a vendor's that is not installed
        return None
    return module


@functools.cache
def _accelerators() -> dict[str, ModuleType]:
    """Return torch's modules of the kinds of accelerators that a process may use: see `is_current`.

    Their devices are not touched, and need not exist.
    """
    current = torch.accelerator.current_accelerator()
    kinds = dict.fromkeys([*([] if current is None else [current.type]), "cuda"])
    found = {kind: _module(torch.device(kind)) for kind in kinds}
    return {kind: module for kind, module in found.items() if module is not None}


def _in_use() -> list[ModuleType]:
    """Return torch's modules of the accelerators of which this process has used a device."""
    return [
        module
        for module in _accelerators().values()
        if getattr(module, "is_initialized", lambda: True)()  # MPS is, as soon as it is there
    ]


def seed_accelerator(seed: int) -> None:
    """Seed the generators of all devices, if this process uses any."""
    for module in _in_use():
        getattr(module, "manual_seed_all" if hasattr(module, "manual_seed_all") else "manual_seed")(
            seed
        )


def accelerator_rng() -> list[tuple[Any, Any]]:
    """Return the generators' states of all devices, if this process uses any; see `set_rng`."""
    return [
        (module, module.get_rng_state_all())
        for module in _in_use()
        if hasattr(module, "get_rng_state_all") and hasattr(module, "set_rng_state_all")
    ]


def set_accelerator_rng(states: list[tuple[Any, Any]]) -> None:
    for module, state in states:
        module.set_rng_state_all(state)


def resolve_device(name: str) -> torch.device:
    """Return the device that a config's name stands for on this host; it may not exist.

    Raises:
        RuntimeError: torch knows no such device.
    """
    if name == AUTO:
        return torch.accelerator.current_accelerator(check_available=True) or CPU
    return torch.device(name)


def working_device(name: str) -> torch.device:
    """Return the device that a config's name stands for, with its number, once it has computed.

    Raises:
        ConfigError: this host has no such device, or torch cannot use it.
    """
    try:
        tensor = torch.ones(2, device=resolve_device(name))
        tensor.sum().item()
    except torch.OutOfMemoryError:  # it is there
        raise
    except (RuntimeError, AssertionError, ImportError) as error:  # by the kind of device
        reason, found = str(error).partition("\n")[0], ", ".join(existing())
        raise ConfigError(
            f"device = {name!r} is not available here, but {found}: {reason}; "
            'device = "auto" takes what a host has'
        ) from error
    return tensor.device


def existing() -> list[str]:
    """Return the names of this host's devices."""
    return ["cpu", *(name for kind in _accelerators() for name in alike(kind))]


def alike(kind: str) -> list[str]:
    """Return the names of this host's devices of a kind of accelerator."""
    module = _accelerators().get(kind)
    count = 0 if module is None or not module.is_available() else module.device_count()
    return [f"{kind}:{index}" for index in range(count)]


def settle(wanted: Sequence[str], own: int) -> str:
    """Return the device of a worker of this host, with its index if the config leaves it open.

    Args:
        wanted: see `device_places.place`.
    """
    return candidates(wanted, own)[0]


def candidates(wanted: Sequence[str], own: int) -> list[str]:
    """Return the device of a worker of this host and, if another job has it, those that would do.

    Args:
        wanted: see `device_places.place`.
    """
    if wanted[own] != AUTO:
        return [wanted[own]]
    accelerated = alike(resolve_device(AUTO).type)
    order = device_places.candidates(wanted, own, len(accelerated)) if accelerated else []
    return [accelerated[index] for index in order] or ["cpu"]


def unique_id(name: str) -> str:
    """Return what stands for a device in all processes of this host: its unique id, or its name.

    A process that sees only some of the devices has other names for them. One that does not exist
    has its name; whoever uses it says so.
    """
    try:
        known = getattr(_ask(torch.device(name), "get_device_properties"), "uuid", "")
    except (RuntimeError, AssertionError, ImportError):  # by the kind of device
        known = ""
    text = known.hex() if isinstance(known, bytes) else str(known)
    return text if device_places.ID.fullmatch(text) else name


def device_name(device: torch.device) -> str:
    """Return a name for people, "NVIDIA H100" or "x86_64 AVX512".

    A CPU's name includes the instructions that torch uses, since others round differently.
    """
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(_ask(device, "get_device_name") or device.type)


def memory_advice(error: BaseException) -> str:
    """Return what is in use and what would help if a device has run out of memory, else nothing."""
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    used = {name: _ask(torch.device(name), "memory_allocated") for name in existing()[1:]}
    in_use = [f"{format_size(size)} in use on {name}" for name, size in used.items() if size]
    return (
        f"; {', '.join(in_use) or 'nothing in use'} by this stage: give it recompute = true, a "
        "smaller max_in_flight, more micro-batches, or fewer layers by another balance"
    )


def is_lost(error: BaseException) -> bool:
    """Return whether an error of a device's driver leaves this process without the device.

    An assertion in a kernel does so as well, but it fails again wherever the code runs: an index is
    out of range.
    """
    is_of_a_driver = isinstance(error, torch.AcceleratorError) and "assert" not in str(error)
    return is_of_a_driver and bool(_in_use())  # else there was none to lose


def scalars_to_host(scalars: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy scalars to the host; those of one device in one copy, for which the host waits once."""
    kinds = {(value.device, value.dtype) for value in scalars.values()}
    if len(kinds) != 1 or any(device == CPU for device, _ in kinds):  # the CPU's are there already
        return {name: value.cpu() for name, value in scalars.items()}
    host = torch.stack([*scalars.values()]).cpu().unbind()
    return {name: value.clone() for name, value in zip(scalars, host, strict=True)}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if is_current(device):
        torch.accelerator.synchronize(device)
    else:
        _ask(device, "synchronize")


def _ask(device: torch.device, question: str) -> Any:
    """Return what torch's module of the device's kind answers; None if it has no such function."""
    function = getattr(_module(device), question, None)
    return None if function is None else function(device)


def base_bytes(device: torch.device) -> int:
    """Return this process's peak memory on the CPU; 0 for other devices."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MemoryMeter:
    """Memory of a stage: memory allocated by torch on an accelerator, else resident memory.

    Create it when the stage has been built and nothing has run.

    Attributes:
        idle: bytes at that time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.idle = self._now()

    def peak(self) -> int:
        """Return the most bytes until now."""
        most = None if self._device.type == "cpu" else _ask(self._device, "max_memory_allocated")
        return max(self.idle, base_bytes(CPU) if most is None else most)

    def allocated(self) -> int:
        """Return the bytes that this process has on an accelerator; 0 on the CPU, or if unknown."""
        is_accelerator = self._device.type != "cpu"
        return int(_ask(self._device, "memory_allocated") or 0) if is_accelerator else 0

    def free(self) -> int | None:
        """Return the bytes of the device that nobody uses; None if unknown."""
        if self._device.type != "cpu":
            return available_bytes(self._device)
        free = _host_free()
        return None if free is None else min([free, *_container_free()])

    def _now(self) -> int:
        if self._device.type != "cpu":
            allocated: int | None = _ask(self._device, "memory_allocated")
            if allocated is not None:
                return allocated
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device and this process's own; None if unknown.

    The limit of the container, if it has one, is the most.
    """
    if device.type != "cpu":
        free_and_total = _ask(device, "mem_get_info")
        return None if free_and_total is None else int(free_and_total[0])
    free = _host_free()
    return None if free is None else min([free + base_bytes(device), *_container_limit()])


def _host_free() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


CONTAINER = Path("/sys/fs/cgroup")


def _container_free() -> list[int]:
    """Return what a container's processes have left of its limit; files read long ago count."""
    try:
        used = int((CONTAINER / "memory.current").read_text())
        stat = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [max(0, most - used + int(stat.get("inactive_file", 0))) for most in _container_limit()]


def _container_limit() -> list[int]:
    try:
        text = (CONTAINER / "memory.max").read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []
