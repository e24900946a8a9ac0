"""Files that a run writes for its user, where the process that makes them must not write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from rpcmp.errors import ConfigError
from rpcmp.process.channel import Message

OUTPUT_KEYS = ("save_state", "trace", "last_steps")
"""The keys of an order to train that are paths of files."""

MAX_HOLES = 2**20
"""Bytes of a file that may take up no disk blocks; file systems store small files elsewhere."""

BLOCK = 2**20


class OutputFiles:
    """Files that the driver process of one generation writes, such as a trace.

    If it is confined, it cannot open their destinations. It writes to its own temporary folder, and
    this process copies the files from there.

    Args:
        scratch: the driver process's temporary folder; None: it is not confined.
    """

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._destinations: dict[Path, Path] = {}

    def redirect(self, order: Message) -> Message:
        if self._scratch is None:
            return order
        redirected = dict(order)
        for key in OUTPUT_KEYS:
            if order.get(key):
                destination = Path(order[key])
                # The suffix decides whether a trace is compressed.
                written = self._scratch / f"{key}-{destination.name}"
                self._destinations[written] = destination
                redirected[key] = str(written)
        return redirected

    def deliver(self) -> None:
        for written, destination in self._destinations.items():
            if not os.path.lexists(written):  # a short run has no last steps
                continue
            try:
                with (
                    open(written, "rb", opener=_open_own) as source,
                    destination.open("wb") as target,
                ):
                    _copy(source, target)
            except OSError as error:
                raise ConfigError(f"cannot write {destination}: {error.strerror}") from error


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file up to its present size, unless it has holes, which the copy would fill."""
    status = os.fstat(source.fileno())
    if status.st_size > status.st_blocks * 512 + MAX_HOLES:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, and most are not there")
    left = status.st_size
    while left and (part := source.read(min(left, BLOCK))):
        target.write(part)
        left -= len(part)


def _open_own(path: str, flags: int) -> int:
    """Open a file only if the driver process has written it: this process may read more."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, f"{path} is not a file of the driver process")
