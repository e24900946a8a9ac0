"""Memory of a process that others on its host may map: how it is named, and opened for them.

    child   find(address) ────address────> its supervisor    opens /proc/PID/fd/N of the owner
            <────────── descriptor, or none ──

The kernel allows that to the owner's user on the owner's host. A confined process may open nothing
of another one, so supervisors do it for all children. The memory has its owner's name and a random
one, which only the members of a group learn: neither a member nor a driver can have anything else
opened, and no member another one's memory as its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import threading
from typing import NamedTuple

PREFIX = "rpcmp-tensors-"

ANNOUNCED = "memory of "
"""Before a member's name: the key in a group's store under which it announces its memory."""

MAX_OWNER = 128
"""Characters of an owner's name in that of its memory, which may have 249 bytes."""

MAX_ADDRESS = 1024


class MemoryAddress(NamedTuple):
    """Where a process has the descriptor of memory with that name."""

    pid: int
    fd: int
    name: str

    @classmethod
    def parse(cls, text: str) -> MemoryAddress:
        """Parse what `str` has made; raises ValueError."""
        match json.loads(text):
            case [int(pid), int(fd), str(name)]:
                return cls(pid, fd, name)
        raise ValueError(f"{text!r} is no address of memory")

    def __str__(self) -> str:
        return json.dumps(self)


def is_of(address: str, owner: str) -> bool:
    """Whether an address is of memory that a process has created under this owner's name."""
    try:
        name = MemoryAddress.parse(address).name
    except (ValueError, RecursionError):
        return False
    own = re.escape(f"{PREFIX}{owner[:MAX_OWNER]}-")
    return re.fullmatch(f"{own}[0-9a-f]{{32}}", name) is not None


def create_memory(owner: str) -> MemoryAddress:
    """Create memory of this process that can grow, with its owner's name; see `is_of`."""
    name = f"{PREFIX}{owner[:MAX_OWNER]}-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Readers have it mapped: memory that shrinks would end them by a signal.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return MemoryAddress(os.getpid(), fd, name)


def open_descriptor(pid: int, fd: int, name: str) -> int:
    """Open memory of that name which another process of this user has under a descriptor.

    Raises:
        OSError: there is no such memory.
    """
    path, expected = f"/proc/{pid}/fd/{fd}", f"/memfd:{name} (deleted)"
    if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # root could open every user's
        raise OSError("not a process of this user")
    # Before it is opened: in another pid namespace this is something else, and to open that may
    # have an effect.
    if os.readlink(path) != expected:
        raise OSError("not the memory that was meant")
    own = os.open(path, os.O_RDWR)
    if os.readlink(f"/proc/self/fd/{own}") != expected:
        os.close(own)
        raise OSError("not the memory that was meant")
    return own


def open_memory(address: str) -> int | None:
    """Return a descriptor of another process's memory; None if it cannot be opened from here."""
    try:
        pid, fd, name = MemoryAddress.parse(address)
        if not name.startswith(PREFIX):
            return None
        own = open_descriptor(pid, fd, name)
    except (OSError, ValueError, RecursionError):  # another host, too many files, no address
        return None
    with contextlib.suppress(OSError):  # a file, which has no seals
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return own
    os.close(own)
    return None


class MemoryFinder:
    """A child's end of the line by which its supervisor opens memory for it. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()

    def find(self, address: str) -> int | None:
        """Return what `open_memory` does at the supervisor; None also if that is gone."""
        data = address.encode()
        if not 0 < len(data) <= MAX_ADDRESS:
            return None
        with self._lock:
            try:
                self._socket.send(data)
                _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
            except OSError:
                return None
        return fds[0] if fds else None


class MemoryLender:
    """A supervisor's end, which answers one child. Create it in an event loop, and `close` it.

    Attributes:
        fd: the descriptor that the child inherits; closed by `start`.
    """

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.fd = self._theirs.fileno()

    def start(self) -> None:
        """Answer from now on, as the child has inherited its end."""
        self._theirs.close()
        asyncio.get_running_loop().add_reader(self._socket, self._answer)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._theirs.close()
        self._socket.close()

    def _answer(self) -> None:
        try:
            address = self._socket.recv(MAX_ADDRESS)
        except BlockingIOError:
            return
        except OSError:
            address = b""
        if not address:  # the child has ended
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        found = open_memory(address.decode(errors="replace"))
        try:
            socket.send_fds(self._socket, [b"\n"], [] if found is None else [found])
        except OSError:  # it has ended meanwhile
            pass
        finally:
            if found is not None:
                os.close(found)
