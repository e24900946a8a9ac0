"""Landlock: a process gives up what it may open, for itself and all that it starts, for good.

It needs no privileges, and holds for root too. A process so restricted may not attach to one that
is not, nor read its memory, environment and descriptors under /proc; and where the kernel's ABI is
6 or newer not send it a signal either. See https://docs.kernel.org/userspace-api/landlock.html.

Giving up privileges: root's, and those that a process has in a user namespace of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from rpcmp.process.grants import Access, Grant

KNOWN_ABI = 7
"""Newest version whose rights are known here; newer kernels have all of them."""

SCOPES_ABI = 6
"""Since when signals and abstract Unix sockets can be held back."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL

_RIGHTS_SINCE = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many rights there are, from the lowest bit on, since which ABI."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the version that the kernel offers; 0: none."""
    found: int = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(found, 0)


def restrict(granted: Iterable[Grant]) -> None:
    """Restrict the calling thread, and those that it starts, to what is granted.

    The process must have set `no_new_privs`, and its kernel have Landlock.

    Raises:
        OSError: the kernel refuses it.
    """
    version = min(abi(), KNOWN_ABI)
    handled = (1 << max(n for since, n in _RIGHTS_SINCE.items() if since <= version)) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    attributes = struct.pack("=QQQ", handled, 0, scoped)[: 24 if version >= SCOPES_ABI else 8]
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for grant in granted:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or not for us
                _add(ruleset, grant, handled)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, grant: Grant, handled: int) -> None:
    fd = os.open(grant.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rights = _rights(grant.access) & handled
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        if rights:
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def _rights(access: Access) -> int:
    match access:
        case Access.LIST:
            return _READ_DIR
        case Access.READ:
            return _READ_DIR | _READ_FILE | _EXECUTE
        case Access.WRITE:
            return ~_MAKE_DEVICES


def _call(number: int, *arguments: object) -> int:
    result: int = _LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result


_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_CLEAR_ALL = 4
_VERSION_3 = 0x20080522


def gain_none() -> None:
    """Gain no privileges by starting a program any more: this process, and all that it starts.

    Raises:
        OSError: the kernel refuses it.
    """
    _require(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop() -> None:
    """Give up all capabilities of the calling thread.

    Raises:
        OSError: the kernel refuses it.
    """
    number = 0
    while not _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
        number += 1
    if ctypes.get_errno() not in (errno.EINVAL, errno.EPERM):  # that was the last; or none is ours
        _require(-1)
    _require(_LIBC.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0))
    header = struct.pack("=Ii", _VERSION_3, 0)
    _require(_LIBC.capset(header, bytes(24)))


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"giving up capabilities: {os.strerror(number)}")
