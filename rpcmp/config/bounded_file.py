"""Read files of unknown origin without waiting and without exceeding a limit of memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MIB = 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises ValueError for pipes and devices, without waiting."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is not a regular file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or not a regular file.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is longer than {limit // MIB} MiB")
    return data
