"""What a confined process may open: folders but for what is hidden in them.

Landlock grants what lies beneath a folder and cannot take any of it back. So where something hidden
lies beneath a granted folder, the entries along the way are granted one by one:

    grant /home/ann/job, hide /home/ann/job/certs:

    /home/ann/job             LIST: what is in it, and what is in certs, but no file of theirs
    /home/ann/job/model.py    READ
    /home/ann/job/data        READ

What is put into such a folder later is not granted.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Access(enum.Enum):
    """What is granted: to list folders; to read and execute too; to write and make files too."""

    LIST = "list"
    READ = "read"
    WRITE = "write"


class Grant(NamedTuple):
    """Access to a file, or to a folder and all beneath it.

    Attributes:
        path: absolute, without links.
        access: to it.
    """

    path: str
    access: Access


def grants(paths: Iterable[str], access: Access, hidden: Iterable[str]) -> list[Grant]:
    """Grant `access` to each of `paths` but for what is hidden.

    Args:
        paths: absolute; links are followed, and those that do not exist left out.
        access: to them.
        hidden: files and folders that stay out of reach, with all beneath them.
    """
    unseen = {os.path.realpath(path) for path in hidden}
    found: list[Grant] = []
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        if os.path.exists(path) and not any(_lies_in(path, other) for other in unseen):
            found += _granted(path, access, unseen)
    return found


def _granted(path: str, access: Access, hidden: set[str]) -> Iterator[Grant]:
    within = {other for other in hidden if _lies_in(other, path)}
    if not within:
        yield Grant(path, access)
    elif path not in within:
        yield Grant(path, Access.LIST)
        for entry in _entries(path):
            if not entry.is_symlink():  # what it leads to is granted by its own name, or not at all
                yield from _granted(entry.path, access, within)


def private_files(folder: str, depth: int = 100) -> list[str]:
    """Return what in `folder` is not for every user of the host to read: keys, hashes of passwords.

    Whoever owns a file may read it, and root owns those of /etc.

    Args:
        folder: absolute.
        depth: how many folders deep it is looked at.
    """
    found = []
    for entry in _entries(folder):
        if entry.is_symlink():
            continue
        is_folder = entry.is_dir()
        wanted = stat.S_IROTH | stat.S_IXOTH if is_folder else stat.S_IROTH
        if entry.stat(follow_symlinks=False).st_mode & wanted != wanted:
            found.append(entry.path)
        elif is_folder and depth > 1:
            found += private_files(entry.path, depth - 1)
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # another user's
        return list(entries)
    return []


def _lies_in(path: str, folder: str) -> bool:
    """Whether `path` is `folder`, or lies beneath it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")
