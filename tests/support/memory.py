"""The peak memory of a command, and its limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST_MIB = 600
"""MiB of memory that `rpcmp trace` may use; it once used 5,900 for a file of 2.9 MB."""

MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print("MiB", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)
"""


def measured(*arguments: str | Path) -> tuple[int, str, int]:
    """Run a command; return its exit code, standard error and peak memory in MiB."""
    words = [sys.executable, "-c", MEASURED, sys.executable, "-m", "rpcmp", *map(str, arguments)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return found.returncode, found.stderr, int(found.stdout.rpartition("MiB")[2])
