"""Folders of a process that are gone with it, in the system's place for temporary files.

Only their user can look into them. The process holds a lock on each, so that what one that was
killed has left can be told from what is in use. A process id in the name would not do: processes in
containers may share /tmp, and see only their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_UNLOCKED = "unlocked-"
"""Until it is locked it must not look like one that was left."""

_locks: dict[Path, int] = {}
"""Descriptors of the folders of this process."""


def create(prefix: str) -> Path:
    """A fresh folder, whose name begins with `prefix`."""
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED + prefix))
    fd = _lock(unlocked)
    folder = unlocked.with_name(unlocked.name.removeprefix(_UNLOCKED))
    unlocked.rename(folder)
    _locks[folder] = fd
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of this process."""
    shutil.rmtree(folder, ignore_errors=True)
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)


def sweep(prefix: str) -> None:
    """Remove what processes that were killed have left behind: folders that nobody locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, somebody else's, or no folder
            fd = _lock(folder)
            remove(folder)
            os.close(fd)


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
