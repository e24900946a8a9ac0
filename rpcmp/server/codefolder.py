"""Where a job's Python files lie on a stage's host: a folder of the job, gone with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from rpcmp import scratch
from rpcmp.errors import ConfigError
from rpcmp.v1 import control_pb2 as pb

PREFIX = "rpcmp-code-"


def unpack(files: Iterable[pb.CodeFile]) -> Path:
    """A fresh folder that holds `files`; `scratch.remove` removes it.

    Raises:
        ConfigError: a file would land outside of it.
    """
    folder = scratch.create(PREFIX)
    try:
        for file in files:
            target = folder.joinpath(*_safe_parts(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    except BaseException:
        scratch.remove(folder)
        raise
    return folder


@contextlib.contextmanager
def unpacked(code: Iterable[pb.CodeFile]) -> Iterator[Path | None]:
    """The folder of a job's files, where it has any; gone at the end of the block.

    Raises:
        ConfigError: a file would land outside of it.
    """
    files = list(code)
    folder = unpack(files) if files else None
    try:
        yield folder
    finally:
        if folder is not None:
            scratch.remove(folder)


def _safe_parts(path: str) -> tuple[str, ...]:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts or "\0" in path:
        raise ConfigError(f"refusing to unpack code to {path!r}")
    return relative.parts
