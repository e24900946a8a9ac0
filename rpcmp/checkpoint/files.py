"""Writing files that a crash cannot leave half done, and checking them when they are read.

A file appears under its name only when all of its bytes are on the disk, and the return of
`write_durably` means that it stays there when the power fails. Files may be larger than memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

BLOCK = 1 << 22
"""Bytes that are read or written at a time."""

PART = 1 << 20
"""Bytes of a part that travels in one message."""

ALIGNMENT = 4096
"""What offsets and lengths must be multiples of to pass the page cache by."""


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
    return _durably(path, lambda temporary: _write(temporary, chunks))


def write_memory_durably(path: Path, memory: memoryview) -> Written:
    """Write `memory`, which begins at a page, as `write_durably` does.

    Past the page cache, where the file system can: a checkpoint is not read again soon, and to copy
    it there takes as long as to hash it, from a stage that computes on the same cores.

    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
    return _durably(path, lambda temporary: _write_memory(temporary, memory))


def _durably(path: Path, write: Callable[[Path], Written]) -> Written:
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        written = write(temporary)
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


async def parts(path: Path) -> AsyncIterator[bytes]:
    """A file's content, in parts that a message can carry; read on another thread.

    Raises:
        OSError: it cannot be read.
    """
    content = _parts(path)
    while part := await asyncio.to_thread(next, content, b""):
        yield part


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


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART):
            yield part


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


def _write_memory(path: Path, memory: memoryview) -> Written:
    whole_blocks = memory.nbytes // ALIGNMENT * ALIGNMENT
    with _open_direct(path) as file:
        for offset in range(0, whole_blocks, BLOCK):
            _write_all(file, memory[offset : min(whole_blocks, offset + BLOCK)])
    with path.open("ab", buffering=0) as file:
        _write_all(file, memory[whole_blocks:])
        os.fsync(file.fileno())
    return Written(hashlib.sha256(memory).hexdigest(), memory.nbytes)


def _open_direct(path: Path) -> FileIO:
    """A new file, written without the page cache where that can be done."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags)
    return FileIO(fd, "wb")


def _write_all(file: FileIO, memory: memoryview) -> None:
    while memory.nbytes:
        memory = memory[file.write(memory) :]


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
