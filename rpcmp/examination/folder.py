"""Trying whether a folder keeps what is written there: as checkpoints are, by fsync and rename."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from rpcmp.checkpoint.files import write_durably
from rpcmp.errors import one_line
from rpcmp.examination.facts import Folder

PREFIX = ".rpcmp-doctor-"


def try_out(path: Path, marker: str = "") -> Folder:
    """Write a file into the folder and remove it; where it is missing, where it would be made.

    Args:
        path: of the folder, which need not exist.
        marker: name of a file to look for in there; empty: none.
    """
    place = next(one for one in (path, *path.parents) if one.exists())
    try:
        with marked(place):
            found = bool(marker) and (path / marker).exists()
            return Folder(free_bytes=shutil.disk_usage(place).free, has_marker=found)
    except OSError as error:
        return Folder(problem=error.strerror or one_line(error))


@contextlib.contextmanager
def marked(path: Path) -> Iterator[str]:
    """The name of a fresh file in the folder, for the length of the block.

    A folder that is missing is made, and removed again unless others have begun to use it.

    Raises:
        OSError: it cannot be written, or not removed.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    marker = path / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        try:
            write_durably(marker, [b"rpcmp doctor was here\n"])
            yield marker.name
        finally:
            marker.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            for one in missing:
                one.rmdir()
