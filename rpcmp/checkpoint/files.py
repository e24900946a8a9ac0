"""Files that a crash cannot leave half written, in folders that no link leads out of.

A file appears under its name only when all of its bytes are on the disk. When `write_durably`
returns, the file survives a power failure. Files may be larger than memory.

A path in a message is taken apart as text, and then walked from the folder on, one descriptor after
the other, so links are not followed, even if they are made meanwhile. `openat2` would do so in one
call, but not on every kernel, and the walk is of two or three steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import platform
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from rpcmp.errors import CheckpointError, ConfigError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

PRIVATE = 0o600
"""Mode of files that only their owner may read."""

BLOCK = 1 << 22
"""Bytes that are copied at a time."""

PART = 1 << 20
"""Bytes of a part that travels in one message."""

ALIGNMENT = 4096
"""Offsets and lengths of writes that bypass the page cache are multiples of this."""


@dataclass(frozen=True)
class Inside:
    """A file or folder beneath `root`; it need not exist.

    Attributes:
        root: the folder, chosen by its owner; links on the way to it are followed.
        parts: plain names, from `root` on.
        path: the same place as messages name it: by the driver's own path.
    """

    root: Path
    parts: tuple[str, ...]
    path: PurePath

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def real(self) -> Path:
        """The path, if no link has been put on the way meanwhile."""
        return self.root.joinpath(*self.parts)

    def __str__(self) -> str:
        return str(self.real)

    def __truediv__(self, name: str) -> Inside:
        require_plain(name)
        return Inside(self.root, (*self.parts, name), self.path / name)

    def at(self, path: str) -> Inside:
        """Return the place in this folder that a message names; CheckpointError for others."""
        try:
            steps = PurePath(path).relative_to(self.path).parts
        except ValueError:
            steps = ()
        if not steps:
            raise CheckpointError(f"{path!r} is not in the folder of the job's checkpoints")
        place = self
        for step in steps:
            place = place / step
        return place


def beneath(root: Path, folder: str) -> Inside:
    """Return the place of a job's folder; CheckpointError unless it is `root` or beneath it."""
    try:
        path = Path(folder)
        parts = path.resolve().relative_to(root).parts
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte; links in a circle
        raise CheckpointError(f"{folder!r} is neither {root} nor beneath it") from error
    if not path.is_absolute():
        raise CheckpointError(f"{folder!r} is not absolute")
    return Inside(root, parts, path)


def place_of(root: Path, folder: str, relative: str, parents: Sequence[Path] = ()) -> Inside:
    """Return a server's place for the folder that a job calls `folder`; `root` or beneath it.

    On a host without the driver's path that is `relative`, below the folder that the server was
    started in or below another of `parents`.

    Args:
        relative: the folder relative to the config's, at the driver; empty if it is absolute there.

    Raises:
        CheckpointError: none of these places is beneath `root`.
    """
    try:
        return beneath(root, folder)
    except CheckpointError as error:
        for parent in (Path.cwd(), *parents) if relative else ():
            with contextlib.suppress(CheckpointError):
                return replace(beneath(root, str(parent / relative)), path=PurePath(folder))
        raise error


def require_plain(name: str) -> None:
    """Raise CheckpointError unless `name` is the name of a file in a folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CheckpointError(f"{name!r} cannot be the name of a file")


def make_folder(name: str | Path, above: int | None = None) -> bool:
    """Make a folder that only its owner may enter; returns whether it was missing."""
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        return False
    return True


Where = Path | Inside
"""A file that this user names, or one that a message names."""


class Written(NamedTuple):
    """Hash and size in bytes of a file that was written."""

    sha256: str
    size: int


def require_place(folder: Where) -> None:
    """Raise ConfigError unless checkpoints can be written to a folder; makes it if missing."""
    probe = folder / f".rpcmp-{secrets.token_hex(8)}"
    try:
        write_durably(probe, [bytes(ALIGNMENT)])
        with folder_of(probe) as inside:
            os.unlink(probe.name, dir_fd=inside)
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be written to {folder} on {platform.node()}: "
            f"{error.strerror or error}; set checkpoint.dir to a folder that every host can write"
        ) from error


def write_durably(
    where: Where, chunks: Iterable[bytes | memoryview], mode: int = PRIVATE
) -> Written:
    """Write `chunks` to a file, all or nothing; makes its missing parent folders.

    A file of that name is replaced when the new one is complete. If writing fails with an OSError,
    no temporary file is left.

    Args:
        mode: the file's, before the umask.
    """
    return _durably(where, lambda fd: _write(fd, chunks), mode)


def require_room(where: Inside, size: int) -> None:
    """Raise OSError if its disk has no room for a file of so many bytes."""
    above = next(each for each in (where.real, *where.real.parents) if each.exists())
    if size > shutil.disk_usage(above).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy_durably(where: Where, memory: int, length: int) -> Written:
    """Write the first bytes of a memfd as `write_durably` does.

    Bypasses the page cache if the file system allows it: a checkpoint is not read again soon, and
    copying it to the cache takes as long as hashing it, on cores on which a stage computes.

    Args:
        memory: descriptor. It is read and not mapped, as a process that shares it could cut it off.
    """
    return _durably(where, lambda fd: _copy(fd, memory, length), PRIVATE)


def _durably(where: Where, write: Callable[[int], Written], mode: int) -> Written:
    with folder_of(where, make=True) as folder:
        # A random name, so that no link can be put in its place. If the writer is killed, the file
        # is removed together with its step folder.
        temporary = f".{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            try:
                written = write(fd)
            finally:
                os.close(fd)
            os.replace(temporary, where.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            # The error to report is the first one, not that the rest could not be removed either.
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        sync(folder)
    return written


@contextlib.contextmanager
def folder_of(where: Where, make: bool = False) -> Iterator[int]:
    """Open the parent folder of a file or folder; for an Inside, OSError if a link is on the way.

    Args:
        make: create it and those above it if they are missing.
    """
    root = where.parent if isinstance(where, Path) else where.root
    if make:
        _make_folders(root)
    fd = os.open(root, FOLDER)
    try:
        for name in where.parts[:-1] if isinstance(where, Inside) else ():
            if make and make_folder(name, fd):
                sync(fd)
            above, fd = fd, os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def sync(folder: int) -> None:
    """Make the names in an open folder durable: new files, renames and removals."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise


async def parts(where: Where) -> AsyncIterator[bytes]:
    """Yield a file's content in parts that a message can carry; reads on another thread."""
    content = _parts(where)
    while part := await asyncio.to_thread(next, content, b""):
        yield part


def check(where: Where, sha256: str, size: int) -> Literal["ok", "missing", "damaged"]:
    """Compare a file with the hash and size that it was written with.

    The size is compared first, so a file that was cut off is found without reading it. A file that
    the disk cannot read counts as damaged.

    Raises:
        OSError: the file exists but cannot be opened.
    """
    try:
        with _opened(where) as file:
            is_whole = os.fstat(file.fileno()).st_size == size
            is_same = is_whole and hashlib.file_digest(file, "sha256").hexdigest() == sha256
            return "ok" if is_same else "damaged"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        if error.errno in (errno.EIO, errno.EISDIR, errno.ELOOP):  # a disk; no file; a link
            return "damaged"
        raise


@contextlib.contextmanager
def _opened(where: Where) -> Iterator[FileIO]:
    """Open a regular file for reading, without waiting; for an Inside, not through a link."""
    with folder_of(where) as folder:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        if isinstance(where, Inside):
            flags |= os.O_NOFOLLOW
        fd = os.open(where.name, flags, dir_fd=folder)
    with FileIO(fd) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EISDIR, "Not a regular file", str(where))
        yield file


def _parts(where: Where) -> Iterator[bytes]:
    with _opened(where) as file:
        while part := file.read(PART):
            yield part


def _write(fd: int, chunks: Iterable[bytes | memoryview]) -> Written:
    digest = hashlib.sha256()
    size = 0
    with open(fd, "wb", closefd=False) as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += memoryview(chunk).nbytes
        file.flush()
        os.fsync(fd)
    return Written(digest.hexdigest(), size)


def _copy(fd: int, memory: int, length: int) -> Written:
    digest = hashlib.sha256()
    block = memoryview(mmap.mmap(-1, BLOCK))  # begins at a page
    for offset in range(0, length, BLOCK):
        part = block[: min(BLOCK, length - offset)]
        if os.preadv(memory, [part], offset) != len(part):
            raise OSError(errno.EIO, "its memory has been cut off")
        digest.update(part)
        _set_direct(fd, len(part) % ALIGNMENT == 0)
        _write_all(fd, part)
    os.fsync(fd)
    return Written(digest.hexdigest(), length)


def _set_direct(fd: int, direct: bool) -> None:
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _write_all(fd: int, memory: memoryview) -> None:
    while memory.nbytes:
        memory = memory[os.write(fd, memory) :]


def _make_folders(folder: Path) -> None:
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        if make_folder(one):
            with folder_of(one) as parent:
                sync(parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
