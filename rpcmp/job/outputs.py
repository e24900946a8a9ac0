"""Files that the driver process writes, such as a trace: a confined one cannot write where they go.

It gets names in its own temporary folder, and this process moves what lies there to its place.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from rpcmp.errors import ConfigError
from rpcmp.process.channel import Message

KEYS = ("save_state", "trace", "last_steps")
"""Of an order to train; what each file is."""

MAX_HOLES = 2**20
"""Bytes that need not be on the disk: those of a small file may lie elsewhere."""

BLOCK = 2**20


class OutputFiles:
    """The files of one generation.

    Args:
        scratch: the driver process's temporary folder; None: it is not confined, and writes files
            to their places itself.
    """

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._places: dict[Path, Path] = {}

    def redirect(self, order: Message) -> Message:
        """The order, with names that the driver process can write to."""
        if self._scratch is None:
            return order
        redirected = dict(order)
        for key in KEYS:
            if order.get(key):
                place = Path(order[key])
                # With its name: by its suffix a trace is compressed.
                written = self._scratch / f"{key}-{place.name}"
                self._places[written] = place
                redirected[key] = str(written)
        return redirected

    def deliver(self) -> None:
        """Move what has been written to its place.

        Raises:
            ConfigError: it cannot be moved there.
        """
        for written, place in self._places.items():
            if not os.path.lexists(written):  # of last steps there may be none
                continue
            try:
                with open(written, "rb", opener=_open_own) as source, place.open("wb") as target:
                    _copy(source, target)
            except OSError as error:
                raise ConfigError(f"cannot write {place}: {error.strerror}") from error


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file as long as it is now, and as it takes up on the disk: holes would be written out.

    Raises:
        OSError: it has holes, or cannot be copied.
    """
    found = os.fstat(source.fileno())
    if found.st_size > found.st_blocks * 512 + MAX_HOLES:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and most are not there")
    left = found.st_size
    while left and (part := source.read(min(left, BLOCK))):
        target.write(part)
        left -= len(part)


def _open_own(path: str, flags: int) -> int:
    """Open a file that the driver process has written, and no other: this process may read more.

    Raises:
        OSError: it is a link, or no regular file, or one that has another name elsewhere.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, f"{path} is not a file of the driver process")
