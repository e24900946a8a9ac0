"""Owners of the other ends of loopback connections, according to the kernel.

Without certificates only the processes of one user, and root's, talk to each other. Servers ask the
kernel for the owner of each connection, and clients for the owner of the server that they have
reached. A request to netlink's sock_diag(7) is for one socket, so its cost does not grow with the
machine's connections. Requests are made on a thread, as another process may hold the kernel's lock
for them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import pwd
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rpcmp.errors import SecurityError
from rpcmp.process import sockets
from rpcmp.process.sockets import ESTABLISHED, LISTEN

ANSWER_SECONDS = 2
"""Time limit for an answer of the kernel."""

LAST_WORDS = 0.05
"""Seconds that a server's connections may outlive its listener, at most."""

ACCEPT_PAUSES = (0.001, 0.005, 0.02)
"""Intervals of checks whether a server has accepted our connection; the last one repeats."""

OVERFLOW_UID = 65534
"""The kernel's default for users without a number in a user namespace."""

ALL_UIDS = 2**32 - 1

SYN_RECEIVED = 3
"""TCP state of a connection that no process has yet."""

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2

_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_REST = struct.Struct("=III")
_ANSWER = struct.Struct("=BB62xII")
"""Fields of `struct inet_diag_msg`: family, state, and far behind them the user and the inode."""

Host = ipaddress.IPv4Address | ipaddress.IPv6Address
Place = tuple[Host, int]

_thread = ThreadPoolExecutor(1, "rpcmp-localpeer")


class LocalSocket(NamedTuple):
    """A TCP socket of this machine.

    Attributes:
        state: its TCP state.
        uid: its user, as numbered in this process's user namespace.
        inode: its number; 0 if it belongs to no process, as before it is accepted.
    """

    state: int
    uid: int
    inode: int


def owner(connection: socket.socket) -> int | None:
    """Return the user id of the other end's process; None if there is none on this machine.

    Raises:
        SecurityError: the kernel does not answer.
    """
    try:
        here, there = _place(connection.getsockname()), _place(connection.getpeername())
        found = _ask(there, here)
        # Had our own end been reset meanwhile, what was found could be the next one between the
        # same two ports, another user's: while ours lasts, there is no other.
        connection.getpeername()
        if found is None:
            _require_alive(connection)
    except OSError:
        return None
    # Of one that is closing, or that no process has accepted, kernels say user 0.
    return found.uid if found and found.state == ESTABLISHED and found.inode else None


def is_trusted(uid: int | None) -> bool:
    """Return whether a user is our own or root, whose processes may do all that ours may.

    User 0 is root of this process's user namespace, which has power over us in it. The kernel shows
    the machine's root by that number only if the namespace contains it. A user that the namespace
    does not contain shows as the overflow uid, like all other such users. So that uid is never
    trusted: not as our own, should it be our number, and not as root's, should an administrator
    have chosen 0.
    """
    if uid is None or uid not in (0, os.geteuid()):
        return False
    return uid != _overflow_uid() or _maps_all_users()


async def owner_of(connection: socket.socket) -> int | None:
    """Return `owner` of a connection, without blocking the event loop.

    Raises:
        SecurityError: the kernel does not answer.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, owner, connection)


async def require_same_user(connection: socket.socket) -> None:
    """Refuse a connection of another user's process.

    Raises:
        SecurityError: it is another user's, or the kernel does not tell whose.
    """
    if not is_trusted(await owner_of(connection)):
        raise SecurityError("it is another user's")


async def works_here(connection: socket.socket, parent: int) -> bool:
    """Return whether the process at the other end of a connection may use this server.

    Args:
        connection: on loopback, of this user or root.
        parent: process id of the only process that may, with its children; 0: any process that is
            not confined, as the code of jobs is. Root's processes, which we may not look into,
            always may.

    Raises:
        SecurityError: the kernel does not answer.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread, _works_here, connection, parent)


def _works_here(connection: socket.socket, parent: int) -> bool:
    try:
        here, there = _place(connection.getsockname()), _place(connection.getpeername())
    except OSError:
        return False
    found = _ask(there, here)
    if found is None or not found.inode:
        return False
    if parent:
        return sockets.is_of_family(found.inode, parent)
    return found.uid != os.geteuid() or sockets.is_free(found.inode)


async def is_process(connection: socket.socket, pid: int) -> bool:
    """Return whether a process of this user has the other end of a connection.

    Args:
        connection: to any address; if that is another machine's, the result is False.
        pid: process id.

    Raises:
        OSError: the connection is gone.
        SecurityError: the kernel does not answer.
    """
    here, there = _place(connection.getsockname()), _place(connection.getpeername())
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(_thread, _ask, there, here)
    return found is not None and found.inode > 0 and sockets.has_socket(pid, found.inode)


async def require_own_server(connection: socket.socket, address: str) -> None:
    """Refuse a server of another user, before a byte is sent to it.

    Returns once the server has accepted the connection; the caller sets a timeout.

    Args:
        connection: has just been opened.
        address: HOST:PORT that was dialled, for errors.

    Raises:
        SecurityError: another user serves there, or the kernel does not tell who does.
        OSError: the connection is gone.
    """
    loop = asyncio.get_running_loop()
    # First the listener: another user's that never accepts is refused by name.
    await loop.run_in_executor(_thread, _require_own_listener, connection, address)
    # Then the other end. Asked alone, it could be one that waits to be accepted, for which kernels
    # before 6.17 say user 0; a listener alone could be one that has replaced another. In this
    # order nothing slips through: a listener that is closed takes with it what it has not
    # accepted, and what it has accepted is its user's, who is found here. So is the service of a
    # user whose listener root has opened. A connection in between, taken from the queue and not
    # yet any process's, has no inode, and is looked at again.
    pauses = iter(ACCEPT_PAUSES)
    while not await loop.run_in_executor(_thread, _is_accepted, connection, address):
        await asyncio.sleep(next(pauses, ACCEPT_PAUSES[-1]))


def require_answers(listener: socket.socket) -> None:
    """Check that the kernel tells the owner of a socket, with one of our own that listens.

    Raises:
        SecurityError: it does not.
    """
    here = _place(listener.getsockname())
    if _ask(here, _anywhere(here)) is None:
        raise _silence("it does not know this process's own sockets")


def _require_own_listener(connection: socket.socket, address: str) -> None:
    there = _place(connection.getpeername())
    found = _ask(there, _anywhere(there))
    if found is None or found.state != LISTEN:
        _require_alive(connection)
        # A server that ends closes its listener first, and then what it has accepted.
        time.sleep(LAST_WORDS)
        _require_alive(connection)
        raise SecurityError(
            f"{address} is served by no process that this kernel shows, as if the port were "
            "forwarded to a container: give --certs, so that the server proves who it is; or "
            "--insecure, where nobody else is on this machine"
        )
    _require_trusted(found.uid, address)


def _require_alive(connection: socket.socket) -> None:
    """Check that our own end is still connected."""
    found = _ask(_place(connection.getsockname()), _place(connection.getpeername()))
    connection.getpeername()  # which fails for one that has been reset: no kernel knows it then
    if found is None:
        raise _silence("it does not know this process's own sockets")
    if found.state != ESTABLISHED:
        raise ConnectionResetError("it has hung up")


def _is_accepted(connection: socket.socket, address: str) -> bool:
    here, there = _place(connection.getsockname()), _place(connection.getpeername())
    found = _ask(there, here)
    connection.getpeername()  # as above: while our end lasts, what was found is its other end
    if found is not None and found.state == SYN_RECEIVED:
        # The kernel keeps it back until we say something (TCP_DEFER_ACCEPT). It is still the
        # listener's that was looked at, and gone if that is.
        return True
    if found is None or found.state != ESTABLISHED:
        raise ConnectionResetError("it has hung up")
    if not found.inode:
        return False
    _require_trusted(found.uid, address)
    return True


def _require_trusted(uid: int, address: str) -> None:
    if not is_trusted(uid):
        raise SecurityError(
            f"{address} is served by {_named(uid)}, not by you: give --certs, so that the server "
            "proves who it is, or choose another port"
        )


def _named(uid: int) -> str:
    if uid == _overflow_uid() and not _maps_all_users():
        return "a user who is unknown in this user namespace"
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return OVERFLOW_UID


def _maps_all_users() -> bool:
    """Return whether every user of the machine has a number in this process's user namespace.

    A map covers at most the surrounding namespace, in whose numbers it is written.
    """
    try:
        rows = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return False
    return sum(int(row.split()[2]) for row in rows) >= ALL_UIDS


def _place(address: tuple[str, int] | tuple[str, int, int, int]) -> Place:
    """Return host and port; unwraps an IPv4 address of an IPv6 socket."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host, address[1]


def _anywhere(place: Place) -> Place:
    """Return the remote end of a listening socket: none."""
    return type(place[0])(0), 0


def _ask(local: Place, remote: Place) -> LocalSocket | None:
    """Return the TCP socket with these two ends, else the one that listens at `local`.

    That is the socket to which the kernel would deliver a packet from `remote`, including IPv6
    sockets for both protocols.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as line:
            line.settimeout(ANSWER_SECONDS)
            line.send(_question(local, remote))
            answer = line.recv(8192)
    except (OSError, AttributeError) as error:  # a system without netlink has no such attribute
        raise _silence(getattr(error, "strerror", None) or str(error)) from error
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _BY_FAMILY:
        _, state, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        return LocalSocket(state, uid, inode)
    # The same answer as of a kernel without this service, which callers tell apart by a socket of
    # their own.
    return None


def _question(local: Place, remote: Place) -> bytes:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    body = b"".join(
        [
            _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 2**32 - 1),
            _PORTS.pack(local[1], remote[1]),
            local[0].packed.ljust(16, b"\0"),
            remote[0].packed.ljust(16, b"\0"),
            # By the loopback interface, which a socket may be bound to; and of whatever cookie.
            _REST.pack(_loopback(), 2**32 - 1, 2**32 - 1),
        ]
    )
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body


def _loopback() -> int:
    try:
        return socket.if_nametoindex("lo")
    except OSError:
        return 0


def _silence(reason: str) -> SecurityError:
    return SecurityError(
        f"this kernel does not say whose a loopback connection is (netlink sock_diag: {reason}): "
        "give --certs, so that both ends prove who they are; or --insecure, where nobody else is "
        "on this machine"
    )
