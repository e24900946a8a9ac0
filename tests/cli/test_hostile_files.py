"""Files that somebody else wrote: a command that reads them takes no more memory than it may."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MIB = 600
"""Of memory that `rpcmp trace` may take; it was 5,900 for 2.9 MB of a file."""


MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print("MiB", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)
"""


def measured(*arguments: str | Path) -> tuple[int, str, int]:
    """Exit code and standard error of a command, and the MiB that it took at most."""
    words = [sys.executable, "-c", MEASURED, sys.executable, "-m", "rpcmp", *map(str, arguments)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return found.returncode, found.stderr, int(found.stdout.rpartition("MiB")[2])


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
    code, said, mib = measured("trace", path)
    assert (code, mib < MOST_MIB) == (2, True), (code, mib)
    assert str(path) in said
    assert reason in said
