"""Files of JSON objects, one a line, that only grow: who writes one may be killed at any time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rpcmp.config.bounded_file import MIB, open_regular

MAX_LINE = 4 * MIB
"""Bytes of a line that is read."""

MAX_FILE = 1024 * MIB
"""Bytes of a file that is read."""

Opener = Callable[[str, int], int]
"""What `open` takes to open a file in another way."""


def dumps(value: Any) -> str:
    """`value` as JSON on one line; a number that is not finite, which JSON has not, as null."""
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
    """Open a file; where it is new, only its owner may read it."""
    return os.open(path, flags, 0o600)


class Writer:
    """Appends lines; each is with the system when `append` returns.

    Args:
        path: the file; made where it is missing.
        opener: as of `open`.

    Raises:
        OSError: it cannot be written; so does `append`.
    """

    def __init__(self, path: Path, opener: Opener | None = None) -> None:
        self._file = open(path, "ab", buffering=0, opener=opener)  # noqa: SIM115 # closed by close

    def append(self, value: Any) -> None:
        """Write a line, in one piece: a kill leaves it whole, or it is the last and cut off."""
        line = f"{dumps(value)}\n".encode()
        written = self._file.write(line)
        if written < len(line):  # the disk is full: the rest says so
            self._file.write(line[written:])

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file; without its last line, where that was cut off.

    Raises:
        OSError: it cannot be read.
        ValueError: another line is no JSON object, or too long; says which. Or the file is.
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
