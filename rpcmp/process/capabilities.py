"""Giving up privileges: root's, and those that a process has in a user namespace of its own."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_CLEAR_ALL = 4
_VERSION_3 = 0x20080522

_LIBC = ctypes.CDLL(None, use_errno=True)


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
