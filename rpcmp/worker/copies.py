"""Copies between a stage's device and the host, beside what the stage computes.

    RPC threads       message ──> pinned memory ──the stream in──> the device
    compute thread        waits for the copy: kernels ──> an event of the computing stream
    sending thread    message <── pinned memory <──the stream out── the device

What arrives is copied as soon as it is there, on a stream that waits for nothing that is computed.
The computing stream waits for the event of the copies that it needs, and for no others. What leaves
is copied on a stream that waits for the kernels before it. The host waits for the event of that
copy in a thread of its own, which then sends: the thread that launches kernels never waits.

The copies are as safe as torch's allocators: pinned memory stays until the copies that it is part
of are made, and so does memory of the device, once the allocator knows of a second stream.

From device to device, a tensor goes without the host: its producer copies it within its device to a
block of shared memory there, its reader from that to its own memory, and gradients likewise. No
event goes with it: a message is sent once its tensors are there, as on the host. A reader holds
the block until its copy is made, which it asks whenever it starts another one.

A CPU computes where the messages are. On devices without streams or pinned memory, and on
those that torch has beside its accelerator, each copy is made when it is needed, by the thread that
needs it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpcmp.pipelining import pytree
from rpcmp.pipelining.devices import CPU, is_current, synchronize
from rpcmp.rpc.messages import StageOutputs
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor, is_worth_sharing

Arriving = Callable[[], list[Tensor]]
"""Returns tensors on the device, on the compute thread."""


def copies_of(device: torch.device) -> Copies:
    """Return the copies of a stage on `device`, as fast as that can make them."""
    if not is_current(device):  # only the streams of those are known, and memory pinned for them
        return Copies(device)
    try:
        return OverlappedCopies(device)
    except (RuntimeError, NotImplementedError):  # it has no streams, no events or no pinned memory
        return Copies(device)


class Copies:
    """Copies that are made at once, by the thread that needs them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, tensors: Sequence[Tensor]) -> Arriving:
        """Start to copy tensors of the host, or of a peer's device, from any thread."""
        of_peers = any(tensor.device != CPU for tensor in tensors)

        def arrived() -> list[Tensor]:
            copies = [each.detach().to(self.device, copy=each.device != CPU) for each in tensors]
            if of_peers:  # which may be overwritten from now on
                synchronize(self.device)
            return copies

        return arrived

    def to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor on the host, which has its values once `when_made` says so."""
        return tensor.to(CPU, dtype).contiguous()

    def copied(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Do the same as `to_host`, in memory that no other code writes to."""
        return torch.empty(tensor.shape, dtype=dtype, device=CPU).copy_(tensor.detach())

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy to what others read, which has the values once `when_made` says so."""
        target.copy_(source.detach())
        synchronize(target.device)

    def when_made(self, act: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Call `act` once all copies to others are made that this thread has started.

        Args:
            act, failed: must not raise; `failed` is called instead if the device cannot copy.
        """
        act()


class OverlappedCopies(Copies):
    """Copies on streams of their own. All but `to_device` is the compute thread's.

    Raises:
        RuntimeError: the device has no streams or no events, or the host no pinned memory for it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in, self._out = torch.Stream(device=device), torch.Stream(device=device)
        self._out.wait_stream(self._computing)
        torch.empty(1, pin_memory=True)
        self._starting = threading.Lock()
        self._writes: list[tuple[Tensor, Tensor]] = []
        self._on_devices: list[Tensor] = []
        self._reading: deque[tuple[torch.Event, list[Tensor]]] = deque()
        self._is_copying = False
        self._sending = ThreadPoolExecutor(1, "rpcmp-send")

    def to_device(self, tensors: Sequence[Tensor]) -> Arriving:
        if not tensors or not all(tensor.layout is torch.strided for tensor in tensors):
            return super().to_device(tensors)
        try:
            copies, made = self._start(tensors)
        except RuntimeError:  # such as a lack of memory: the compute thread meets and explains it
            return super().to_device(tensors)

        def arrived() -> list[Tensor]:
            self._computing.wait_event(made)
            for copy in copies:
                copy.record_stream(self._computing)
            return copies

        return arrived

    def _start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Copy to memory of the stream in, so that it need not wait until others have freed it."""
        made = torch.Event(device=self.device)
        with torch.no_grad():
            ready = [
                torch.empty_like(each, pin_memory=True).copy_(each) if each.device == CPU else each
                for each in tensors
            ]
            with self._starting, self._in:  # torch: one thread may enter a stream
                copies = [
                    torch.empty_like(each, device=self.device).copy_(each, non_blocking=True)
                    for each in ready
                ]
                made.record(self._in)
                while self._reading and self._reading[0][0].query():
                    self._reading.popleft()
                if of_peers := [each for each in tensors if each.device != CPU]:
                    self._reading.append((made, of_peers))
        return copies, made

    def to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return super().copied(tensor, dtype)
        with torch.no_grad():
            # A copy on the device: a layer may write to its output in its next forward. The cast is
            # the device's as well, since one on the way would be the host's, which would wait.
            own = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
            pinned = torch.empty(own.shape, dtype=dtype, pin_memory=True)
            self._out.wait_stream(self._computing)
            with self._out:
                pinned.copy_(own, non_blocking=True)
            own.record_stream(self._out)
        self._is_copying = True
        return pinned

    copied = to_host

    def write(self, target: Tensor, source: Tensor) -> None:
        if target.device == CPU:
            self._writes.append((target, self.to_host(source, target.dtype)))
            return
        self._is_copying = True
        self._on_devices.append(target)
        with torch.no_grad():
            is_here = target.device == self.device
            own = target if is_here else torch.empty_like(target, device=self.device)
            own.copy_(source)
            self._out.wait_stream(self._computing)
            if not is_here:
                with self._out:
                    target.copy_(own, non_blocking=True)
                own.record_stream(self._out)

    def when_made(self, act: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        if not self._is_copying:
            act()
            return
        self._is_copying = False
        made = torch.Event(device=self.device, blocking=True)
        made.record(self._out)
        writes, self._writes = self._writes, []
        on_devices, self._on_devices = self._on_devices, []

        def send() -> None:
            try:
                made.synchronize()
                on_devices.clear()  # which were kept until now, so that nobody else got them
                for target, source in writes:
                    target.copy_(source)
            except BaseException as error:
                failed(error)
            else:
                act()

        self._sending.submit(_or_exit, send)

    @property
    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


def _or_exit(act: Callable[[], None]) -> None:
    """Call what does not raise; if it does, that is a bug, and no caller would see it."""
    try:
        act()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class Received(NamedTuple):
    """What a stage has received for one micro-batch, on its way to the device.

    Attributes:
        inputs: in the order of its references.
        targets: of a sink that needs them; else any.
    """

    inputs: list[StageOutputs]
    targets: StageOutputs
    inputs_arriving: Arriving
    targets_arriving: Arriving

    def targets_on_device(self) -> Any:
        arrived = iter(self.targets_arriving())
        return pytree.map_tensors(lambda _: next(arrived), self.targets.value)


def receive(
    copies: Copies, inputs: list[StageOutputs], targets: StageOutputs, has_targets: bool
) -> Received:
    """Start to copy what a stage has received for one micro-batch."""
    arriving = copies.to_device(tensors_in(inputs))
    return Received(
        inputs, targets, arriving, copies.to_device(tensors_in([targets] if has_targets else []))
    )


def to_wire_dtype(
    outputs: Any, dtype: torch.dtype | None, copies: Copies, memory: OwnMemory | None = None
) -> StageOutputs:
    """Copy a tree of tensors to contiguous memory that no other code writes to.

    Args:
        dtype: of float32 tensors on their way between stages; None: unchanged.
        copies: makes them; the values are there once `Copies.when_made` says so.
        memory: shared with the reader; None: torch RPC sends copies on the host, as it does few
            bytes.
    """
    tensors = pytree.tensors(outputs)
    if memory is not None and not is_worth_sharing(tensors):
        memory = None
    narrowed = tuple(i for i, t in enumerate(tensors) if dtype and t.dtype is torch.float32)

    def copy(index: int, tensor: Tensor) -> Tensor | SharedTensor:
        kind = (dtype if index in narrowed else None) or tensor.dtype
        if memory is None:
            return copies.copied(tensor, kind)
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        placed = memory.allocate(tuple(tensor.shape), kind, needs_gradient)
        copies.write(placed.tensor, tensor)
        return placed

    made = iter([copy(*each) for each in enumerate(tensors)])
    return StageOutputs(pytree.map_tensors(lambda _: next(made), outputs), narrowed=narrowed)


def tensors_in(received: Iterable[StageOutputs]) -> list[Tensor]:
    return [tensor for outputs in received for tensor in pytree.tensors(outputs.value)]


def from_wire_dtype(received: Sequence[StageOutputs], arrived: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that have arrived, of the dtype that the producer computed."""
    if not any(outputs.narrowed for outputs in received):
        return list(arrived)
    is_narrowed = [
        index in outputs.narrowed
        for outputs in received
        for index in range(len(pytree.tensors(outputs.value)))
    ]
    return [
        tensor.to(torch.float32) if narrowed else tensor
        for tensor, narrowed in zip(arrived, is_narrowed, strict=True)
    ]
