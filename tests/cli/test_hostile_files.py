"""Commands that read hostile files stay within their memory limit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.memory import MOST_MIB, measured

BOMBS = {
    "a value": ((b'{"metadata": [', *[b"[]," * 2**20] * 12), "longer than"),
    "a text": ((b'{"traceEvents": ["', *[b" " * 2**20] * 128), "longer than"),
    "depth": ((b'{"traceEvents": [', b"[" * 500_000), "recursion"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_archive_does_not_fill_the_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    parts, reason = BOMBS[name]
    with gzip.open(path, "wb", 1) as file:
        for part in parts:
            file.write(part)
    code, message, mib = measured("trace", path)
    assert (code, mib < MOST_MIB) == (2, True), (code, mib)
    assert str(path) in message
    assert reason in message
