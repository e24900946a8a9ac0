"""Files that anybody may have written, read without taking more memory than is meant for them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MIB = 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe, on which opening would wait, or a device is none.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is no regular file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        limit: bytes that it may have.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or no regular file.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is longer than {limit // MIB} MiB")
    return data
