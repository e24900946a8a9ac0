"""Landlock: restrict what this process, and all that it starts, may open. It cannot be undone.

Landlock needs no privileges, and binds root too. A restricted process may not attach to an
unrestricted one, nor read its memory, environment or descriptors under /proc. From ABI 6 on it may
not send it a signal either. See https://docs.kernel.org/userspace-api/landlock.html.

Landlock grants what lies beneath a folder and cannot take any of it back. If something hidden lies
beneath a granted folder, the entries along the way are therefore granted one by one:

    grant /home/ann/job, hide /home/ann/job/certs:

    /home/ann/job             LIST: names of entries, also those in certs, but no file's content
    /home/ann/job/model.py    READ
    /home/ann/job/data        READ

An entry that is later added to such a folder is not granted.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KNOWN_ABI = 7
"""Newest version whose rights are known here; newer kernels have all of them."""

SCOPES_ABI = 6
"""First version that can restrict signals and abstract Unix sockets."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL

_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""By ABI: how many rights it has, counted from the lowest bit."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class Access(enum.Enum):
    """List folders; also read and execute files; also write and create files."""

    LIST = "list"
    READ = "read"
    WRITE = "write"


class Grant(NamedTuple):
    """Access to a file, or to a folder and everything beneath it."""

    path: str
    access: Access


def grants(paths: Iterable[str], access: Access, hidden: Iterable[str]) -> list[Grant]:
    """Grant `access` to each of `paths` except for `hidden` files and folders.

    Args:
        paths: absolute; links are followed, missing files are skipped.
        hidden: files and folders that stay out of reach with everything beneath them.
    """
    hidden_paths = {os.path.realpath(path) for path in hidden}
    result: list[Grant] = []
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        if os.path.exists(path) and not any(_lies_in(path, other) for other in hidden_paths):
            result += _grant_around(path, access, hidden_paths)
    return result


def _grant_around(path: str, access: Access, hidden: set[str]) -> Iterator[Grant]:
    within = {other for other in hidden if _lies_in(other, path)}
    if not within:
        yield Grant(path, access)
    elif path not in within:
        yield Grant(path, Access.LIST)
        for entry in _entries(path):
            if not entry.is_symlink():  # its target is granted by its own name, or not at all
                yield from _grant_around(entry.path, access, within)


def private_files(folder: str, depth: int = 100) -> list[str]:
    """Return the entries of `folder` that are not world-readable, such as keys and password hashes.

    Permissions alone do not protect them: a file's owner may read it, and /etc belongs to root.
    """
    result = []
    for entry in _entries(folder):
        if entry.is_symlink():
            continue
        is_folder = entry.is_dir()
        wanted = stat.S_IROTH | stat.S_IXOTH if is_folder else stat.S_IROTH
        if entry.stat(follow_symlinks=False).st_mode & wanted != wanted:
            result.append(entry.path)
        elif is_folder and depth > 1:
            result += private_files(entry.path, depth - 1)
    return result


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # another user's
        return list(entries)
    return []


def _lies_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def abi() -> int:
    """Return the version that the kernel offers; 0 if it has no Landlock."""
    version: int = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(version, 0)


def restrict(granted: Iterable[Grant]) -> None:
    """Restrict the calling thread, and those that it starts, to what is granted.

    The process must have set `no_new_privs`, and its kernel must have Landlock.
    """
    version = min(abi(), KNOWN_ABI)
    handled = (1 << max(n for since, n in _NUM_RIGHTS.items() if since <= version)) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    attributes = struct.pack("=QQQ", handled, 0, scoped)[: 24 if version >= SCOPES_ABI else 8]
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for grant in granted:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or not ours
                _add(ruleset, grant, handled)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, grant: Grant, handled: int) -> None:
    fd = os.open(grant.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rights = _rights(grant.access) & handled
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
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
