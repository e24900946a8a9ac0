"""An accelerator without hardware: tensors of `pretend:0` to `pretend:3` that the CPU computes.

Loaded into every process by torch itself, through an entry point `torch.backends`, as the devices
of vendors outside of torch are; see `tests.support.pretend`. Imports nothing of rpcmp or its tests.

As on CUDA, an operation on tensors of two devices raises, a device has an amount of memory that is
counted and may be used up, an index that does not exist is an error, and a process that was forked
after its parent had used a device cannot use one. Its streams have no order but that of events, see
pretend_streams.py. The bits are the CPU's: every kernel is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_kernels  # type: ignore[import-not-found]  # it lies beside this file
import pretend_streams  # type: ignore[import-not-found]
import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
COUNT = int(os.environ.get("PRETEND_DEVICES", "4"))
MEMORY = int(os.environ.get("PRETEND_MEMORY", str(2**30)))
"""Bytes of each device."""

aten = torch.ops.aten


class Devices:
    """What `torch.pretend` is: the devices of this process, and their memory."""

    def __init__(self) -> None:
        self.used = [0] * COUNT
        self.peak = [0] * COUNT
        self.streams = pretend_streams.Streams()
        self.library: Any = None
        self.told: Any = None
        self.asked: Any = None
        self.kernels: Any = None
        self._visible = _visible(os.environ.get("PRETEND_VISIBLE_DEVICES"))
        self._host = os.environ.get("PRETEND_HOST", "")
        self._user = 0  # the process that first used a device
        self._is_lost = False

    def use(self, device: torch.device) -> int:
        """Return a device's index, once it is known that this process may use it."""
        if self._user != (pid := os.getpid()):
            if self._user:
                raise RuntimeError(
                    "Cannot re-initialize the pretend accelerator in forked subprocess: its parent "
                    "has used it"
                )
            self._user = pid
            self.library.use_devices()
        if self._is_lost:
            raise torch.AcceleratorError(f"pretend error: {device} is lost, as in every later call")
        index = self.current_device() if device.index is None else device.index
        if index >= self.device_count():
            raise RuntimeError(f"invalid device ordinal: {device}")
        return index

    def stream(self, index: int) -> tuple[int, int]:
        """Return a device's current stream in this thread."""
        return index, self.library.current_stream(index)

    def lose(self) -> None:
        """Let every later call of this process on any device fail."""
        self._is_lost = True

    def allocate(self, index: int, size: int) -> None:
        if self.used[index] + size > MEMORY:
            raise torch.OutOfMemoryError(
                f"pretend out of memory. Tried to allocate {size} bytes. Device {index} has "
                f"{MEMORY} bytes, of which {MEMORY - self.used[index]} are free."
            )
        self.used[index] += size
        self.peak[index] = max(self.peak[index], self.used[index])

    # What torch asks a device module for.

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return self._user == os.getpid()

    def _is_in_bad_fork(self) -> bool:
        return self._user not in (0, os.getpid())

    def device_count(self) -> int:
        return len(self._visible)

    def current_device(self) -> int:
        return int(torch._C._accelerator_getDeviceIndex())

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: kernels draw from the CPU's generator."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "Pretend P1"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"{self._host}.{self._visible[self.use(device)]}")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return self.used[self._index(device)]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak[self._index(device)]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY - self.used[self._index(device)], MEMORY

    def _index(self, device: Any) -> int:
        return torch.accelerator._utils._get_device_index(device, optional=True)


def _visible(variable: str | None) -> list[str]:
    """Return the numbers on the host of the devices that this process has, in its own order."""
    every = ",".join(map(str, range(COUNT))) if variable is None else variable
    return [each for each in every.split(",") if each]


DEVICES = Devices()


class Allocation:
    """Memory of a device, as long as a tensor lies in it.

    Attributes:
        accesses: the streams that use it.
        is_shared: whether other processes use it as well.
    """

    is_shared = False

    def __init__(self, storage: torch.UntypedStorage, index: int) -> None:
        self._index, self._size = index, 0
        self._storage = storage  # its address is not used again meanwhile
        DEVICES.allocate(index, storage.nbytes())
        self._size = storage.nbytes()
        self.accesses = DEVICES.streams.fresh(DEVICES.stream(index))

    def __del__(self) -> None:
        DEVICES.used[self._index] -= self._size
        if self._size:
            DEVICES.streams.free(self.accesses)


ALLOCATIONS: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
"""By the address of the CPU's storage."""


class PretendTensor(torch.Tensor):
    """A tensor of a device.

    Attributes:
        raw: the CPU's tensor that it is.
    """

    raw: torch.Tensor
    allocation: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> PretendTensor:
        storage = raw.untyped_storage()
        if (allocation := ALLOCATIONS.get(storage._cdata)) is None:
            allocation = ALLOCATIONS[storage._cdata] = Allocation(storage, index)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, index),
        )
        made.raw, made.allocation = raw, allocation
        return made

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(kernel, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.raw}, device='{self.device}')"


COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
"""Kernels that take tensors of two devices."""

READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Kernels whose result the host waits for, besides copies from and to it."""


def run(kernel: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what a kernel computes of tensors of a device."""
    own = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, PretendTensor)]
    if kernel is aten.record_stream.default:
        own[0].allocation.accesses.recorded.add((args[1].device_index, args[1].stream_id))
        return None
    if kernel not in COPIES:
        _require_one_device(kernel, args, kwargs)
    for index in {each.device.index for each in own}:
        DEVICES.use(torch.device(NAME, index))
    target: int | None = next((each.device.index for each in own), None)
    if (wanted := kwargs.get("device")) is not None:
        device = torch.device(wanted)
        target = DEVICES.use(device) if device.type == NAME else None
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif kernel is aten.copy_.default:
        target = args[0].device.index
    where = own[0].device.index if own else target
    if where is not None and not _is_view(kernel):
        launched = launch(where, kernel, args, kwargs)
        if kernel in COPIES and _is_late(kernel, args, kwargs):
            which = "" if _with_host(args) else " within the devices"
            DEVICES.streams.count(f"copy that comes late{which}")
            DEVICES.streams.copy_late(launched, _raw(args[0]), _raw(args[1]))
            return args[0]
        if kernel in READS or (kernel in COPIES and (target is None or _with_host(args))):
            DEVICES.streams.wait_for(*launched.stream)
    if kernel is aten.copy_.default:
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    raw_args, raw_kwargs = pytree.tree_map(_raw, (args, kwargs))
    result = kernel(*raw_args, **raw_kwargs)
    given = {id(each.raw): each for each in own}  # kernels that write into an argument return it

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        return value if target is None else PretendTensor(value, target)

    return pytree.tree_map(wrap, result)


def launch(index: int, kernel: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Add a kernel to the current stream of a device; return this piece of its work.

    As on CUDA, a copy between two devices is work of its source's, for which both wait.
    """
    if kernel is aten.copy_.default and not _with_host(args):
        target, source = (DEVICES.stream(each.device.index) for each in args[:2])
        DEVICES.streams.follow(source, target)
        work = _launch(source, kernel, args, kwargs)
        DEVICES.streams.follow(target, source)
        return work
    return _launch(DEVICES.stream(index), kernel, args, kwargs)


def _launch(stream: Any, kernel: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    written = {
        id(each)
        for number, argument in enumerate(kernel._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for each in pytree.tree_leaves(
            args[number] if number < len(args) else kwargs.get(argument.name)
        )
    }
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PretendTensor)]
    reads = [each.allocation.accesses for each in tensors if id(each) not in written]
    writes = [each.allocation.accesses for each in tensors if id(each) in written]
    return DEVICES.streams.launch(stream, str(kernel), reads, writes)


def _is_view(kernel: Any) -> bool:
    """Whether a kernel neither reads nor writes: its result is a view, or empty."""
    returned = [each.alias_info for each in kernel._schema.returns]
    is_alias = any(info is not None and not info.is_write for info in returned)
    return is_alias or "empty" in str(kernel)


def _is_late(kernel: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host goes on before a copy is made: between a device and pinned memory."""
    if kernel is not aten.copy_.default or not (kwargs.get("non_blocking") or args[2:3] == (True,)):
        return False
    if not _with_host(args):
        return any(each.allocation.is_shared for each in args[:2])
    if args[0].dtype is not args[1].dtype:
        raise NotImplementedError("a copy between host and device that comes late and casts")
    return any(each.is_pinned() for each in _with_host(args))


def _with_host(args: Any) -> list[torch.Tensor]:
    """Return the tensors of the host among those that a kernel copies between."""
    return [each for each in args[:2] if not isinstance(each, PretendTensor)]


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, PretendTensor) else value


def _require_one_device(kernel: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise as CUDA does; numbers of the CPU, which have no dimension, go with every device."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    found = {str(each.device) for each in tensors if each.dim() or isinstance(each, PretendTensor)}
    if len(found) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(found))}! (in {kernel})"
        )


def _tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Any:
    """Make a tensor of data, on a pretended device by a copy.

    torch's function switches off the dispatch to Python that these devices rest on.
    """
    if device is None or torch.device(device).type != NAME:
        return TENSOR(data, device=device, requires_grad=requires_grad, **options)
    return TENSOR(data, **options).to(device).requires_grad_(requires_grad)


TENSOR = torch.tensor


def register() -> None:
    """Make the devices known to torch: the entry point."""
    DEVICES.library = ctypes.CDLL(str(Path(__file__).parent / "guard.so"))
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
    DEVICES.told = kind(DEVICES.streams.tell)
    DEVICES.library.current_stream.restype = ctypes.c_int64
    atexit.register(DEVICES.streams.end)
    DEVICES.asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64)(DEVICES.streams.is_over)
    DEVICES.library.register_devices(DEVICES.device_count(), DEVICES.told, DEVICES.asked)
    # Guard and hooks are there already, so that torch's, which know less, are not registered.
    _setup_privateuseone_for_python_backend(NAME, backend_module=DEVICES)
    # As on CUDA, a module's parameters stay the objects that they are when it is moved.
    torch.__future__.set_swap_module_params_on_conversion(True)
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(lambda kernel, *args, **kwargs: run(kernel, args, kwargs), "PrivateUse1")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    pretend_kernels.add_fused(own, PretendTensor, launch)
    pretend_kernels.add_autocast(own, NAME)
    DEVICES.kernels = fallbacks, own
    torch.tensor = _tensor  # type: ignore[assignment]
