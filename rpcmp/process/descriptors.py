"""File descriptors: how many this process may have, and memory that is shared through them.

The size of shared memory is sealed: a process that reads memory which its peer has cut off ends
with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

ENOUGH = 16_384
"""More than any job needs. A limit of a billion, as some containers have, slows down programs that
close every possible descriptor."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the limit of this process and its children as far as the system allows, up to ENOUGH.

    The default, 1,024, is the limit of select(2), which is not used here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it works with fewer, too
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def memory(name: str, size: int) -> int:
    """Return the descriptor of fresh memory whose size is sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_sealed(fd: int) -> bool:
    """Return whether the size of some memory is sealed."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
