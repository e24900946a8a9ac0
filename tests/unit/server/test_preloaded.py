"""What a template imports for stage servers: it leaves little to them, and survives a fork."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, sys
import rpcmp.cli.serve, rpcmp.server.preloaded
from rpcmp.server.connection import versions

threads = len(os.listdir("/proc/self/task"))
print(threads, versions.cache_info().currsize, "torch" in sys.modules, "pydantic" in sys.modules)
"""


def test_it_starts_no_thread_imports_no_torch_and_knows_the_versions() -> None:
    output = subprocess.check_output([sys.executable, "-c", CODE], text=True, timeout=60)
    assert output.split() == ["1", "1", "False", "False"]
