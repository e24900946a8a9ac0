"""Places beneath a folder that a message may name, and that no link leads out of.

A path in a message is taken apart as text, and then walked from the folder on, one descriptor after
the other: what is a link, or becomes one meanwhile, is not followed. `openat2` would do so in one
call, but not on every kernel, and the walk is of two or three steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from rpcmp.errors import CheckpointError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class Inside:
    """A file or folder beneath `root`; it need not exist.

    Attributes:
        root: of which links are followed: its owner chose it.
        parts: plain names, from `root` on.
        path: what messages call it.
    """

    root: Path
    parts: tuple[str, ...]
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def real(self) -> Path:
        """Where it is, if no link has been put on the way meanwhile."""
        return self.root.joinpath(*self.parts)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Inside:
        require_plain(name)
        return Inside(self.root, (*self.parts, name), self.path / name)

    def at(self, path: str) -> Inside:
        """Return the place in this folder that a message calls `path`.

        Raises:
            CheckpointError: it is somewhere else, or no path.
        """
        try:
            steps = PurePath(path).relative_to(self.path).parts
        except ValueError:
            steps = ()
        if not steps:
            raise CheckpointError(f"{path!r} is not in the folder of the job's checkpoints")
        found = self
        for step in steps:
            found = found / step
        return found

    @contextlib.contextmanager
    def folder(self, make: bool = False) -> Iterator[int]:
        """Open the folder that it lies in.

        Args:
            make: the folder and those above it, where they are missing.

        Raises:
            OSError: it cannot be opened, or a part of the way is a link.
        """
        fd = os.open(self.root, FOLDER)
        try:
            for name in self.parts[:-1]:
                if make and make_folder(name, fd):
                    os.fsync(fd)
                above, fd = fd, os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(above)
            yield fd
        finally:
            os.close(fd)


def beneath(root: Path, folder: str) -> Inside:
    """Return the place of a job's folder, `root` itself or beneath it; links on the way may be.

    Args:
        root: resolved.
        folder: absolute.

    Raises:
        CheckpointError: it is somewhere else, or no path.
    """
    try:
        path = Path(folder)
        parts = path.resolve().relative_to(root).parts
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte; links in a circle
        raise CheckpointError(f"{folder!r} is neither {root} nor beneath it") from error
    if not path.is_absolute():
        raise CheckpointError(f"{folder!r} is not absolute")
    return Inside(root, parts, path)


def require_plain(name: str) -> None:
    """Check that `name` names a file of a folder and nothing else.

    Raises:
        CheckpointError: it does not.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CheckpointError(f"{name!r} cannot be the name of a file")


def make_folder(name: str | Path, above: int | None = None) -> bool:
    """Make a folder that only its owner may enter; returns whether it was missing.

    Args:
        above: descriptor of the folder that `name` is in.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        return False
    return True
