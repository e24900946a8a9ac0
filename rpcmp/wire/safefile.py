"""Writing files that a crash or another process must not find half written."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from rpcmp.errors import SecurityError


def write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole, with its mode from the first byte on.

    A file that is there keeps its owner, and its mode as far as `mode` and reading by its group
    allow: certificates of containers belong to the image's group.

    Raises:
        SecurityError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            _inherit(file.fileno(), path, mode)
            file.write(content)
        new.rename(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def append(path: Path, line: str) -> None:
    """Add one line to a file for its owner alone, on the disk when this returns.

    Raises:
        SecurityError: the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(f"{line}\n".encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, error) from error


def _inherit(descriptor: int, path: Path, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        found = path.stat()
        os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & (mode | stat.S_IRGRP))


def _unwritable(path: Path, error: OSError) -> SecurityError:
    return SecurityError(f"cannot write {path}: {error.strerror or error}")
