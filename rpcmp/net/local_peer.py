"""Owners of the other ends of loopback connections, according to the kernel.

Without certificates only the processes of one user talk to each other. Servers ask the kernel for
the owner of each connection, and clients for the owner of the server that they have reached. Root
is another user: whether a process of root's is confined, as a job's code is, only root can see. A
request to netlink's sock_diag(7) is for one socket, so its cost does not grow with the machine's
connections. Requests are made on a thread, as another process may hold the kernel's lock for them.
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

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1

_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_REST = struct.Struct("=III")
_ANSWER = struct.Struct("=BB62xII")
"""Fields of `struct inet_diag_msg`: family, state, and far behind them the user and the inode."""

_SOURCES = ipaddress.IPv4Address("127.0.0.0")
"""What process ids are added to; they have at most 22 of its 24 bits."""

Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]

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


def source(pid: int) -> str:
    """Return the loopback address from which a process connects to servers of this machine.

    So a server finds the process at once, among those of a job of many stages. Anyone can choose
    any address: it only says where the server looks first.
    """
    return str(_SOURCES + pid)


def _likely(connection: socket.socket) -> int:
    """Return the process that `source` stands for; 0 if it is none."""
    host, _ = _place(connection.getpeername())
    return max(0, int(host) - int(_SOURCES)) if host.version == 4 else 0


def owner(connection: socket.socket) -> int | None:
    """Return the user id of the other end's process; None if there is none on this machine."""
    try:
        other_end = _other_end(connection)
        # Had our own end been reset meanwhile, this could be the next one between the same two
        # ports, another user's: while ours lasts, there is no other.
        connection.getpeername()
        if other_end is None:
            _require_alive(connection)
            return None
    except OSError:
        return None
    # For one that is closing, or that no process has accepted, kernels report user 0.
    is_owned = other_end.state == ESTABLISHED and other_end.inode
    return other_end.uid if is_owned else None


def is_trusted(uid: int | None) -> bool:
    """Return whether a user is our own, whose processes may do all that ours may.

    A user that this process's user namespace does not contain shows as the overflow uid, like all
    other such users. So that uid is not trusted as our own, should it be our number.
    """
    if uid is None or uid != os.geteuid():
        return False
    return uid != _overflow_uid() or _maps_all_users()


async def owner_of(connection: socket.socket) -> int | None:
    """Return `owner` of a connection, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_thread, owner, connection)


async def require_same_user(connection: socket.socket) -> None:
    """Refuse a connection of another user's process, or one whose user the kernel does not tell."""
    if not is_trusted(await owner_of(connection)):
        raise SecurityError("it is another user's")


async def works_here(connection: socket.socket, parent: int) -> bool:
    """Return whether the process at the other end of a connection may use this server.

    Args:
        connection: on loopback.
        parent: process id of the only process that may, with its children; 0: any process of this
            user that is not confined, as the code of jobs is.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread, _works_here, connection, parent)


def _works_here(connection: socket.socket, parent: int) -> bool:
    try:
        other_end, likely = _other_end(connection), _likely(connection)
    except OSError:
        return False
    if other_end is None or not other_end.inode:
        return False
    if parent:
        return sockets.is_of_family(other_end.inode, parent, likely)
    return is_trusted(other_end.uid) and sockets.is_free(other_end.inode)


async def is_process(connection: socket.socket, pid: int) -> bool:
    """Return whether a process of this user has the other end of a connection.

    If that is on another machine, the result is False. Raises OSError if the connection is gone.
    """
    loop = asyncio.get_running_loop()
    other_end = await loop.run_in_executor(_thread, _other_end, connection)
    return bool(other_end and other_end.inode and sockets.has_socket(pid, other_end.inode))


async def require_own_server(connection: socket.socket, address: str) -> None:
    """Refuse a server of another user, before a byte is sent to it.

    Returns once the server has accepted the connection, which has just been opened; the caller sets
    a timeout. `address` is the one that was dialled, for errors.
    """
    loop = asyncio.get_running_loop()
    # First the listener: another user's that never accepts is refused by name.
    await loop.run_in_executor(_thread, _require_own_listener, connection, address)
    # Then the other end. Alone, it could be one that waits to be accepted, for which kernels before
    # 6.17 say user 0; a listener alone could be one that has replaced another. In this order
    # nothing slips through: a listener that is closed takes with it the connections that it has not
    # accepted, and those that it has accepted are its user's, who is found here. A connection in
    # between, taken from the queue and not yet any process's, has no inode, and is looked at again.
    pauses = iter(ACCEPT_PAUSES)
    while not await loop.run_in_executor(_thread, _is_accepted, connection, address):
        await asyncio.sleep(next(pauses, ACCEPT_PAUSES[-1]))


def require_answers(listener: socket.socket) -> None:
    """Check that the kernel tells the owner of a socket, with one of our own that listens."""
    here = _place(listener.getsockname())
    if _ask(here, _anywhere(here)) is None:
        raise _silence("it does not know this process's own sockets")


def _require_own_listener(connection: socket.socket, address: str) -> None:
    there = _place(connection.getpeername())
    listener = _ask(there, _anywhere(there))
    if listener is None or listener.state != LISTEN:
        _require_alive(connection)
        # A server that ends closes its listener first, and then what it has accepted.
        time.sleep(LAST_WORDS)
        _require_alive(connection)
        raise SecurityError(
            f"{address} is served by no process that this kernel shows, as if the port were "
            "forwarded to a container: give --certs, so that the server proves who it is; or "
            "--insecure, where nobody else is on this machine"
        )
    _require_trusted(listener.uid, address)


def _require_alive(connection: socket.socket) -> None:
    """Check that our own end is still connected."""
    own_end = _ask(_place(connection.getsockname()), _place(connection.getpeername()))
    connection.getpeername()  # fails if it has been reset: no kernel knows it then
    if own_end is None:
        raise _silence("it does not know this process's own sockets")
    if own_end.state != ESTABLISHED:
        raise ConnectionResetError("it has hung up")


def _is_accepted(connection: socket.socket, address: str) -> bool:
    other_end = _other_end(connection)
    connection.getpeername()  # as in `owner`: while our end lasts, this is its other end
    if other_end is not None and other_end.state == SYN_RECEIVED:
        # The kernel keeps it back until we send something (TCP_DEFER_ACCEPT). It still belongs to
        # the listener that was looked at, and is gone if that is.
        return True
    if other_end is None or other_end.state != ESTABLISHED:
        raise ConnectionResetError("it has hung up")
    if not other_end.inode:
        return False
    _require_trusted(other_end.uid, address)
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


def _other_end(connection: socket.socket) -> LocalSocket | None:
    return _ask(_place(connection.getpeername()), _place(connection.getsockname()))


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
    # A kernel without this service answers likewise; callers tell by a socket of their own.
    return None


def _question(local: Place, remote: Place) -> bytes:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    body = b"".join(
        [
            _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 2**32 - 1),
            _PORTS.pack(local[1], remote[1]),
            local[0].packed.ljust(16, b"\0"),
            remote[0].packed.ljust(16, b"\0"),
            # By the loopback interface, to which a socket may be bound; with any cookie.
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
