"""The memory that a process shares with other members of its group, and theirs.

announced ──in the group's store──> sharing(member): found, and on devices tried, the first time
for_reader: where to place tensors for a member        attach: the tensors of an answer
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from rpcmp.errors import SecurityError
from rpcmp.process.memory_access import is_of, open_memory
from rpcmp.rpc import device_trial
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor, Sharing

FindMemory = Callable[[str], int | None]
"""Returns a descriptor of memory at an address; None if that is on another host."""


class GroupMemory:
    """What one member needs to exchange tensors with others through memory. Thread-safe.

    Args:
        announced_by: asks for what a member has announced.
        device: on which it computes, if its tensors may stay there; None, or the CPU: they may not.

    Attributes:
        own: what it places for others of its host.
        members: the memory of others, by name; None: they have to send tensors by RPC.
        announced: what others need to find its memory.
    """

    def __init__(
        self,
        name: str,
        announced_by: Callable[[str], bytes],
        find: FindMemory = open_memory,
        device: torch.device | None = None,
    ) -> None:
        self.own = OwnMemory(name)
        self.members: dict[str, PeerMemory | None] = {}
        self._announced_by, self._find = announced_by, find
        self._device, trial = None, ""
        self._on_device: OwnMemory | None = None
        self._members_devices: dict[str, PeerMemory | None] = {}
        self._trials: dict[str, str] = {}
        self._finding = threading.Lock()
        if device is not None and device.type != "cpu":
            self._device = device
            self._on_device, trial = device_trial.create(name, device)
            if self._on_device is not None:
                self._on_device.on_host = self.own
        self.announced = f"{self.own.address}\n{trial}"

    def for_reader(self, sharing: Sharing) -> OwnMemory | None:
        """Return where to place tensors for a member that has this much in common with us."""
        if sharing is Sharing.DEVICE and self._on_device is not None:
            return self._on_device
        return self.own if sharing else None

    def sharing(self, member: str) -> Sharing:
        """Return where a member may place its answers."""
        is_shared = self.shares_host(member)
        if self._device is not None and member not in self._members_devices:
            with self._finding:
                if member not in self._members_devices:
                    find = functools.partial(self._find_own, member)
                    self._members_devices[member] = device_trial.open_tried(
                        member, self._trials[member], find, self._device
                    )
        if self._members_devices.get(member) is not None:
            return Sharing.DEVICE
        return Sharing.HOST if is_shared else Sharing.NONE

    def shares_host(self, member: str) -> bool:
        """Whether a member may place its answers in memory of this host; tries no device."""
        if member not in self.members:
            with self._finding:  # one answer for all threads
                if member not in self.members:
                    announced = self._announced_by(member).decode()
                    address, _, self._trials[member] = announced.partition("\n")
                    fd = self._find_own(member, address)
                    self.members[member] = None if fd is None else PeerMemory(fd)
        return self.members[member] is not None

    def _find_own(self, member: str, address: str) -> int | None:
        """Find a member's memory; what it announces may not be another member's."""
        if not is_of(address, member):
            raise SecurityError(f"{member!r} announces memory that is not its own")
        return self._find(address)

    def attach(self, tensor: SharedTensor, member: str) -> None:
        """Find a tensor of an answer; see `SharedTensor.attach`."""
        memory = (self._members_devices if tensor.on_device else self.members).get(member)
        if memory is None:
            raise SecurityError(f"{member!r} answers with memory that it does not share")
        tensor.attach(memory)
