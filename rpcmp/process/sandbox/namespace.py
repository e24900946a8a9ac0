"""Network namespaces: a loopback that no other user of the machine reaches.

torch RPC listens on a TCP port, authenticates no peer, and runs what it is sent. On the host's
loopback every local user could connect to it. So a worker's RPC agent gets a network namespace of
its own, with nothing in it but loopback. A network namespace belongs to a thread and not to a
process, so only the agent lives in it: it is created in a thread that has moved there, and the
threads that it starts stay there. The user's code runs in other threads, on the host's network, and
may download what it wants.

An ordinary user may create a network namespace inside a user namespace of their own, which grants
no other rights. That takes a process with one thread, so the fork server does it before it imports
anything. Sockets that were created inside can be used anywhere: the supervisor receives those that
it relays with as file descriptors. If the kernel allows none of this, `open_private` gives the
reason, and workers listen on the host's loopback.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAP_SYS_ADMIN = 21
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP_LOOPBACK_RUNNING = 0x1 | 0x8 | 0x40

_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """The network of the RPC agents of this process and of its forks.

    Args:
        namespaces: descriptors of a private network namespace and, if it is ours too, of the user
            namespace that it was created in; empty for the host's network.
        reason: why it is not private.
    """

    def __init__(self, namespaces: Sequence[int] = (), reason: str = "") -> None:
        self.namespaces = list(namespaces)
        self.reason = reason
        self._inside: ThreadPoolExecutor | None = None

    @property
    def is_private(self) -> bool:
        return bool(self.namespaces)

    @property
    def name(self) -> str:
        """Equal for processes that reach each other by loopback, unique over all machines."""
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        status = os.stat(self.namespaces[0] if self.is_private else "/proc/self/ns/net")
        return f"{machine}:{status.st_dev}:{status.st_ino}"

    def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` in this network: in the thread of `stay`, else in one of its own."""
        if self._inside is not None:
            return self._inside.submit(function).result()
        return _in_thread(self._enter, function)

    def stay(self, prepare: Callable[[], None]) -> None:
        """Enter now, in a thread that lives on, before this process gives up the right to do so.

        Args:
            prepare: called in that thread once it is inside.
        """
        self._inside = ThreadPoolExecutor(1, "rpcmp-network")
        self._inside.submit(self._enter).result()
        self._inside.submit(prepare).result()

    def interface(self, rank: int) -> str:
        """Return the interface whose address a group's member listens on, see `add_address`."""
        return _label(rank) if self.is_private else "lo"

    def add_address(self, rank: int) -> None:
        """Add the address that a group's member listens on; a confined member may not do so."""
        if self.is_private:
            self.run(lambda: _add_address(_label(rank), address_of(rank)))

    def connectable(self) -> socket.socket:
        return self.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    def listener(self) -> socket.socket:
        """Return a TCP socket that listens at a free port of this network's loopback."""
        return self.run(lambda: socket.create_server(("127.0.0.1", 0)))

    def _enter(self) -> None:
        if self.is_private:
            _check(_LIBC.setns(self.namespaces[0], _CLONE_NEWNET))


current = Network()
"""The network of this process: set by the fork server, and so inherited by its forks."""


def address_of(rank: int) -> str:
    """Return the loopback address of a group's member, the same in every private network."""
    high, low = divmod(rank + 1, 256)
    return f"127.77.{high}.{low}"


def _label(rank: int) -> str:
    return f"lo:w{rank}"


def open_private() -> Network:
    """Return a network for this process and its forks alone; requires a process of one thread.

    If the kernel or an administrator does not allow one, return the host's, with the reason.
    """
    try:
        _check_allowed()
        user = [] if _is_privileged() else [_enter_user_namespace()]
        return Network(
            [_in_thread(_new_namespace, lambda: _open("/proc/thread-self/ns/net")), *user]
        )
    except OSError as error:
        return Network(reason=f"no network namespace can be made: {error.strerror or error}")


def _check_allowed() -> None:
    """Try it in a forked process: this one could not leave a half-entered user namespace."""
    if not (pid := os.fork()):
        try:
            if not _is_privileged():
                _enter_user_namespace()
            _new_namespace()
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if number := os.waitstatus_to_exitcode(status):
        raise OSError(number, os.strerror(number))


def share(namespaces: Sequence[int]) -> Network:
    """Join the private network of another process; requires a process of one thread."""
    for user in namespaces[1:]:
        _check(_LIBC.setns(user, _CLONE_NEWUSER))
    return Network(namespaces)


def _is_privileged() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def _enter_user_namespace() -> int:
    """Enter a user namespace of our own, as the same user, and return its descriptor."""
    user, group = os.geteuid(), os.getegid()
    _check(_LIBC.unshare(_CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return _open("/proc/self/ns/user")


def _new_namespace() -> None:
    _check(_LIBC.unshare(_CLONE_NEWNET))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.pack("16sH14x", b"lo", _IFF_UP_LOOPBACK_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, flags)


def _open(namespace: str) -> int:
    return os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)


def _add_address(interface: str, address: str) -> None:
    """Add an address to loopback, under a label by which TensorPipe finds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            name, number = interface.encode(), socket.inet_aton(value)
            fcntl.ioctl(
                any_socket, request, struct.pack("16sH2x4s8x", name, socket.AF_INET, number)
            )


def _in_thread(before: Callable[[], None], function: Callable[[], Result]) -> Result:
    """Run `function` in a thread of its own, whose namespaces `before` has changed."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            before()
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rpcmp-network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
