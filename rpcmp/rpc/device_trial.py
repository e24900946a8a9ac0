"""Whether tensors can stay on devices between two processes: tried where `[transfer] direct` asks.

    owner     random bytes in memory of its device; with its address in the group's store: the bytes
    reader    opens that memory, copies them to its own device, and compares; copies them back
              to where gradients go, and compares

Documentation cannot tell: drivers, containers, virtual devices and allocators decide. Where a trial
fails, tensors pass through memory of the host, as without the option. A pair that passes one
exchanges data and gradients by copies from device to device.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from rpcmp.errors import SecurityError, one_line
from rpcmp.rpc.device_memory import KINDS
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor

PATTERN = 64
"""Random bytes of a trial."""

log = logging.getLogger(__name__)


def create(owner: str, device: torch.device) -> tuple[OwnMemory | None, str]:
    """Create memory on a device, and what others need to try it; None and "" if that cannot be."""
    if device.type not in KINDS:
        log.warning(
            "[transfer] direct: there is no way yet to open memory of a %s device in another "
            "process; the tensors of %r pass through memory of the host",
            device.type,
            owner,
        )
        return None, ""
    try:
        memory = OwnMemory(owner, device)
        pattern = secrets.token_bytes(PATTERN)
        numbers = torch.frombuffer(bytearray(pattern), dtype=torch.float32)
        memory.never_returned.append(placed := memory.place(numbers, requires_grad=True))
    except Exception as error:  # of torch or a driver, whatever it is: there is another way
        log.warning(
            "[transfer] direct: %s cannot lend its memory to other processes, so the tensors of "
            "%r pass through memory of the host: %s",
            device,
            owner,
            one_line(error),
        )
        return None, ""
    trial = [str(memory.address), device.type, placed.offset, placed.capacity, pattern.hex()]
    return memory, json.dumps(trial)


def open_tried(
    member: str, trial: str, find_memory: Callable[[str], int | None], device: torch.device
) -> PeerMemory | None:
    """Return a member's memory on its device, once its bytes have arrived on this one's.

    Args:
        trial: what `create` has returned there; "": it has none.
        find_memory: see `rpcmp.rpc.transport.join`.
    """
    if not trial:
        return None
    fd = None
    try:
        address, kind, offset, capacity, pattern = json.loads(trial)
        if kind not in KINDS:
            raise SecurityError(f"there is no memory of {kind!r} devices here")
        if (fd := find_memory(address)) is None:
            return None  # another host
        memory = PeerMemory(fd, kind)
        numbers = torch.float32, (PATTERN // torch.float32.itemsize,), True  # as they were placed
        placed = SharedTensor(offset, capacity, *numbers, reader=1, on_device=True)
        _try(memory, placed, pattern, device)
    except Exception as error:  # likewise
        log.warning(
            "[transfer] direct: tensors of %r cannot come to %s from its device, so they pass "
            "through memory of the host: %s",
            member,
            device,
            one_line(error),
        )
        if fd is not None:
            os.close(fd)
        return None
    log.info("[transfer] direct: tensors of %r come to %s from its device", member, device)
    return memory


def _try(memory: PeerMemory, placed: SharedTensor, pattern: str, device: torch.device) -> None:
    """Copy there and back as training does. All readers write the same bytes to one place, so only
    the first one would see that they are lost; that a device refuses them, each sees.

    Raises:
        RuntimeError, SecurityError: that cannot be.
    """
    placed.attach(memory)
    here = torch.empty(placed.shape, dtype=placed.dtype, device=device).copy_(placed.tensor)
    if _bytes_of(here) != pattern:
        raise RuntimeError("other bytes arrive than are there")
    placed.give_gradient(here)
    there = placed.take_gradient()
    if there is None or _bytes_of(there) != pattern:
        raise RuntimeError("other bytes are written there than were sent")


def _bytes_of(tensor: Tensor) -> str:
    return bytes(tensor.cpu().view(torch.uint8).tolist()).hex()
