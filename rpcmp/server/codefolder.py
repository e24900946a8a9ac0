"""Where a job's Python files lie on a stage's host: a folder of the job, gone with it.

Its server holds a lock on it, so that what a server that was killed has left can be told from what
is in use. A process id in its name would not do: servers in containers may share /tmp, and see only
their own processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from rpcmp.errors import ConfigError
from rpcmp.v1 import control_pb2 as pb

_PREFIX = "rpcmp-code-"

_UNLOCKED_PREFIX = "rpcmp-unlocked-"
"""Until it is locked it must not look like one that was left."""

_locks: dict[Path, int] = {}
"""Descriptors of the folders of this process."""


def unpack(files: Iterable[pb.CodeFile]) -> Path:
    """A fresh folder that holds `files`.

    Raises:
        ConfigError: a file would land outside of it.
    """
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    fd = _lock(unlocked)
    folder = unlocked.with_name(unlocked.name.replace(_UNLOCKED_PREFIX, _PREFIX, 1))
    unlocked.rename(folder)
    _locks[folder] = fd
    try:
        for file in files:
            target = folder.joinpath(*_safe_parts(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    except BaseException:
        remove(folder)
        raise
    return folder


def remove(folder: Path) -> None:
    """Remove a job's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)


def sweep() -> None:
    """Remove what servers that were killed have left behind: folders that nobody locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, somebody else's, or no folder
            fd = _lock(folder)
            remove(folder)
            os.close(fd)


def _safe_parts(path: str) -> tuple[str, ...]:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise ConfigError(f"refusing to unpack code to {path!r}")
    return relative.parts


def _lock(folder: Path) -> int:
    """The descriptor that holds a folder's lock, until it is closed.

    Raises:
        OSError: somebody else holds it; or it cannot be opened, is a link or no folder.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
