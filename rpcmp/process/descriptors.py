"""File descriptors: how many this process may have.

Which process of this machine has a socket, and whether it is confined; as /proc says.

The user of a connection is no proof of what is behind it where code of jobs runs as the same one:
confined to its files (see `rpcmp.process.confinement`), but free to open connections on its host.

Memory that two processes share and neither can cut off: reading what is gone ends a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

ENOUGH = 16_384
"""More than any job needs; a limit of a billion, as some containers have, slows programs down that
close all that there could be."""


def limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Allow this process, and those that it starts, as many as the system grants, up to ENOUGH.

    The default, 1,024, is what select(2) can take, which nothing here uses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it works with fewer, too
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_MARKS = ("NoNewPrivs", "Seccomp_filters")
"""Of a process's status: what only grows, in it and in all that it starts."""


def is_of_family(inode: int, parent: int) -> bool:
    """Return whether a process, or a child of it, has a socket.

    Args:
        inode: the socket's number.
        parent: process id.
    """
    return _holder(inode, [parent, *_children(parent)]) is not None


def is_free(inode: int) -> bool:
    """Return whether a process of this user has a socket that is confined no more than we are.

    One that nobody has whom we can see, as from another container, counts as confined.

    Args:
        inode: the socket's number.
    """
    pid = _holder(inode, _of_this_user())
    if pid is None:
        return False
    # Where this process itself is in a container that filters calls, its neighbours are as well.
    own = _marks(os.getpid())
    return all(theirs <= ours for theirs, ours in zip(_marks(pid), own, strict=True))


def has_socket(pid: int, inode: int) -> bool:
    """Return whether a process has a socket, of the number `inode`."""
    with contextlib.suppress(OSError):  # it has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path) == f"socket:[{inode}]":
                    return True
    return False


def _holder(inode: int, pids: Iterable[int]) -> int | None:
    return next((pid for pid in pids if has_socket(pid, inode)), None)


def _children(parent: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (thread / "children").read_text().split())


def _of_this_user() -> Iterator[int]:
    """The newest first, which are the likeliest to have opened a connection just now."""
    found = (entry for entry in os.scandir("/proc") if entry.name.isdecimal())
    for entry in sorted(found, key=lambda entry: -int(entry.name)):
        with contextlib.suppress(OSError):  # it has ended
            if entry.stat().st_uid == os.geteuid():
                yield int(entry.name)


def _marks(pid: int) -> list[int]:
    """How confined a process is; as much as can be, if it has ended."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return [2**31] * len(_MARKS)
    found = dict(row.split(":", 1) for row in rows if ":" in row)
    return [int(found.get(mark, "0")) for mark in _MARKS]


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory(name: str, size: int) -> int:
    """Return the descriptor of fresh memory, whose size is final.

    Args:
        name: what /proc calls it.
        size: bytes.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_sealed(fd: int) -> bool:
    """Return whether the size of some memory is final."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
