"""Files of JSON objects, one per line, that only grow; the writer may be killed at any time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rpcmp.config.files import MIB, open_regular

MAX_LINE = 4 * MIB
"""Largest line that is read, in bytes."""

MAX_FILE = 1024 * MIB
"""Largest file that is read, in bytes."""

Opener = Callable[[str, int], int]
"""The parameter `opener` of `open`."""


def dumps(value: Any) -> str:
    """Return `value` as one line of JSON; NaN and infinity, which JSON lacks, become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def private(path: str, flags: int) -> int:
    """Open a file; a new file is readable by its owner alone. See `opener` of `open`."""
    return os.open(path, flags, 0o600)


class Writer:
    """Appends lines to a file; each line has reached the kernel when `append` returns.

    Args:
        path: the file; created if it is missing.
        opener: see `open`.
    """

    def __init__(self, path: Path, opener: Opener | None = None) -> None:
        self._file = open(path, "ab", buffering=0, opener=opener)  # noqa: SIM115 # closed by close

    def append(self, value: Any) -> None:
        """Write a line with one call, so that a kill can only cut off the last line."""
        line = f"{dumps(value)}\n".encode()
        written = self._file.write(line)
        if written < len(line):  # the disk is full: writing the rest raises the error
            self._file.write(line[written:])

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, without a last line that was cut off.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is too long or not a JSON object, or the file is too long.
    """
    with open_regular(path) as file:
        return [_object(line, number) for number, line in _lines(file) if line[-1:] == b"\n"]


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number, size = 0, 0
    while line := file.readline(MAX_LINE + 1):
        number, size = number + 1, size + len(line)
        if len(line) > MAX_LINE:
            raise ValueError(f"line {number} is longer than {MAX_LINE // MIB} MiB")
        if size > MAX_FILE:
            raise ValueError(f"it is longer than {MAX_FILE // MIB} MiB")
        yield number, line


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"line {number} is not a JSON object")
    return value
