"""Where a job's Python files lie on a stage's host: a folder of the job, gone with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from rpcmp.errors import ConfigError
from rpcmp.v1 import control_pb2 as pb

_PREFIX = "rpcmp-code-"


def unpack(files: Iterable[pb.CodeFile]) -> Path:
    """A fresh folder that holds `files`.

    Raises:
        ConfigError: a file would land outside of it.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        for file in files:
            target = folder.joinpath(*_safe_parts(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    except BaseException:
        remove(folder)
        raise
    return folder


def remove(folder: Path) -> None:
    """Remove a job's folder."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove what servers that were killed have left behind; their process ids tell."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(PermissionError):  # alive, and somebody else's
            if pid.isdecimal() and not _is_alive(int(pid)):
                remove(folder)


def _safe_parts(path: str) -> tuple[str, ...]:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise ConfigError(f"refusing to unpack code to {path!r}")
    return relative.parts


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True
