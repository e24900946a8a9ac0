"""Folders of a process that are gone with it, in the system's place for temporary files.

Only their user can look into them. The process holds a lock on each, so that what one that was
killed has left can be told from what is in use. A process id in the name would not do: processes in
containers may share /tmp, and see only their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
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
    with contextlib.suppress(OSError):
        _remove_all(folder)
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)


def sweep(prefix: str) -> None:
    """Remove what processes that were killed have left behind: folders that nobody locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, or no folder
            fd = _lock(folder)
            if os.fstat(fd).st_uid == os.geteuid():  # root could remove another user's, too
                remove(folder)
            os.close(fd)


def _remove_all(folder: Path) -> None:
    """Remove a folder with all that is in it.

    Not by shutil.rmtree: a job's code may have nested folders deeper than Python recurses, or taken
    the right to read them from us. So what lies two deep is moved up until there is none.

    Raises:
        OSError: something cannot be removed.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            for inner in _content(entry):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, folder / secrets.token_hex(16))
                else:
                    os.unlink(inner.path)
            (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
    folder.rmdir()


def _content(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    if not entry.is_dir(follow_symlinks=False):
        return []
    os.chmod(entry.path, 0o700)
    return list(os.scandir(entry.path))


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
