"""A loopback that no other user of the machine reaches.

torch RPC listens on a TCP port, asks nobody who he is, and runs what it is sent. On the loopback of
the host every local user could connect. So the agent of a worker gets a network namespace of its
own, with nothing in it but loopback, and as a network namespace belongs to a thread and not to a
process, only the agent does: it is made in a thread that has moved there, and the threads that it
starts stay there. The user's code runs in others, on the host's network, and may download what it
wants.

An ordinary user may make a network namespace inside of a user namespace of his own, in which he is
nobody but himself; that takes a process with one thread, so the fork server does it before it
imports anything. Sockets made inside can be used anywhere: the supervisor gets those that it relays
with as file descriptors. Where the kernel allows none of that, `open_private` says why, and workers
listen on the host's loopback.

Where this process listens.
"""

from __future__ import annotations

import contextlib
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

from rpcmp.config import addresses

Result = TypeVar("Result")

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAP_SYS_ADMIN = 21
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP_LOOPBACK_RUNNING = 0x1 | 0x8 | 0x40

_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """The network that the agents of this process and of its forks are in.

    Args:
        namespaces: descriptors of a private network namespace, and of the user namespace that it
            was made in if that is ours too; empty: the host's.
        reason: why it is not private.

    Attributes:
        namespaces, reason: as given.
    """

    def __init__(self, namespaces: Sequence[int] = (), reason: str = "") -> None:
        self.namespaces = list(namespaces)
        self.reason = reason
        self._inside: ThreadPoolExecutor | None = None

    @property
    def is_private(self) -> bool:
        """Whether nobody else is in it."""
        return bool(self.namespaces)

    @property
    def name(self) -> str:
        """The same for all who reach each other by loopback, on whatever machine."""
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found = os.stat(self.namespaces[0] if self.is_private else "/proc/self/ns/net")
        return f"{machine}:{found.st_dev}:{found.st_ino}"

    def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` in this network, in a thread that ends with it, or in that of `stay`."""
        if self._inside is not None:
            return self._inside.submit(function).result()
        return _in_thread(self._enter, function)

    def stay(self, prepare: Callable[[], None]) -> None:
        """Enter now, in a thread that lives on, for a process that gives up the right to do so.

        Args:
            prepare: called in that thread once it is inside.

        Raises:
            OSError: it cannot enter.
        """
        self._inside = ThreadPoolExecutor(1, "rpcmp-network")
        self._inside.submit(self._enter).result()
        self._inside.submit(prepare).result()

    def interface(self, rank: int) -> str:
        """The interface whose address a group's member listens on, see `add_address`."""
        return _label(rank) if self.is_private else "lo"

    def add_address(self, rank: int) -> None:
        """Give a group's member the address that it listens on; it may not do so itself."""
        if self.is_private:
            self.run(lambda: _add_address(_label(rank), address_of(rank)))

    def connectable(self) -> socket.socket:
        """A TCP socket in this network."""
        return self.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    def listener(self, host: str, port: int) -> socket.socket:
        """A TCP socket in this network that listens.

        Raises:
            OSError: the port is taken.
        """

        def listen() -> socket.socket:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                # What a generation before has closed at the same port is of no concern.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if not self.is_private:  # two servers on a host may relay to the same third
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind((host, port))
                listener.listen()
            except BaseException:
                listener.close()
                raise
            return listener

        return self.run(listen)

    def _enter(self) -> None:
        if self.is_private:
            _check(_LIBC.setns(self.namespaces[0], _CLONE_NEWNET))


current = Network()
"""That of this process: set by the fork server, and so by what it forks."""


def address_of(rank: int) -> str:
    """The loopback address of a group's member, the same in every private network."""
    high, low = divmod(rank + 1, 256)
    return f"127.77.{high}.{low}"


def _label(rank: int) -> str:
    return f"lo:w{rank}"


def open_private() -> Network:
    """A network that only this process and its forks are in; call it before there are threads.

    The host's, with the reason, where the kernel or an administrator does not allow one.
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
    """Try it in a process that ends: half way into a user namespace there is no way back.

    Raises:
        OSError: it is not allowed.
    """
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
    """The private network of another process of ours; call it before there are threads.

    Args:
        namespaces: its `Network.namespaces`.
    """
    for user in namespaces[1:]:
        _check(_LIBC.setns(user, _CLONE_NEWUSER))
    return Network(namespaces)


def _is_privileged() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def _enter_user_namespace() -> int:
    """Be in a user namespace of our own, as the same user."""
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
    """Give loopback one more address, under a label that TensorPipe finds it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            name, number = interface.encode(), socket.inet_aton(value)
            fcntl.ioctl(
                any_socket, request, struct.pack("16sH2x4s8x", name, socket.AF_INET, number)
            )


def _in_thread(before: Callable[[], None], function: Callable[[], Result]) -> Result:
    """What `function` returns in a thread of its own, whose namespaces `before` has changed."""
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


def listeners() -> dict[str, str]:
    """The addresses at which this process listens for TCP, by the sockets' identity in the kernel.

    Whatever network they are in: they are found by this process's descriptors.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:") and (address := _listens_at(int(name))):
                found[link] = address
    return found


def _listens_at(fd: int) -> str:
    """HOST:PORT where a socket listens; empty where it does not, or not for TCP."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return ""
        host, port, *_ = copy.getsockname()
        return addresses.joined(host, port)
