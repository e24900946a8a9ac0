"""Kill the processes that tests have started if the process that ran the tests is gone.

    pytest ──starts──> python -I -S tests/support/reaper.py TOKEN   its standard input: our pipe

A test that fails ends its processes itself. A test that is interrupted or killed cannot: then the
kernel closes the pipe, and all processes with the token in their environment are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TOKEN = "RPCMP_TEST_TOKEN"

ROUNDS = 50
"""Number of searches, 0.1 s apart: a killed process may just have started another one."""


@contextlib.contextmanager
def reaping(token: str) -> Iterator[None]:
    """Start a reaper for the processes with this prefix of TOKEN in their environment."""
    reading, writing = os.pipe()  # children that are executed do not inherit it
    command = [sys.executable, "-I", "-S", __file__, token]
    with subprocess.Popen(command, stdin=reading, env={}, start_new_session=True):
        os.close(reading)
        try:
            yield
        finally:
            os.close(writing)


def carrying(token: str) -> list[int]:
    """Return the processes of this user that have the token in their environment."""
    found, mark = [], f"{TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(each.startswith(mark) for each in entry.read_bytes().split(b"\0")):
                found.append(int(entry.parent.name))
    return found


def main() -> None:
    """Wait for the end of the tests, and kill processes until none is left."""
    sys.stdin.buffer.read()
    for _ in range(ROUNDS):
        if not (left := carrying(sys.argv[1])):
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
