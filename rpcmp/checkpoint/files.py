"""Writing files that a crash cannot leave half done, and checking them when they are read.

A file appears under its name only when all of its bytes are on the disk, and the return of
`write_durably` means that it stays there when the power fails. Files may be larger than memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

BLOCK = 1 << 22
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Written:
    """What `write_durably` wrote: the hash and the bytes of the file."""

    sha256: str
    size: int


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write `chunks` to `path`, all or nothing; makes the folders that it lies in.

    A file that was there stays as it was until the new one is complete.

    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        written = _write(temporary, chunks)
        os.replace(temporary, path)
    except BaseException:
        # What went wrong is the error to report, not that the rest could not be removed either.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return written


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: those that are new, and that others are gone.

    Raises:
        OSError: the disk fails.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    """The hash of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _hash(file)


def check(path: Path, sha256: str, size: int) -> Literal["ok", "missing", "damaged"]:
    """Whether the file at `path` is the one that was written.

    The size is compared first, so a file that was cut off is found without reading it.

    Raises:
        OSError: it is there and cannot be opened. One that the disk cannot read is damaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            is_whole = os.fstat(file.fileno()).st_size == size
            return "ok" if is_whole and _hash(file) == sha256 else "damaged"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        if error.errno in (errno.EIO, errno.EISDIR):
            return "damaged"
        raise


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += memoryview(chunk).nbytes
        file.flush()
        os.fsync(file.fileno())
    return Written(digest.hexdigest(), size)


def _hash(file: FileIO) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def _make_folder(folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_folder(created.parent)
