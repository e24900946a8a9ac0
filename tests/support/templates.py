"""Processes that a template forks, which report their own state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rpcmp.process.forked import ForkedChild
from rpcmp.process.template_client import Template

COMMAND = """
import ctypes, json, os, random, signal, sys, threading
import preloaded
from rpcmp.process.channel import die_with_parent

def main():
    if "with" in sys.argv:
        die_with_parent(int(sys.argv[-1]), signal.SIGTERM)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    report = {
        "pid": os.getpid(),
        "preloaded_in": preloaded.pid,
        "handlers": [str(signal.getsignal(signum)) for signum in signals],
        "path": sys.path,
        "variables": {name: value for name, value in os.environ.items() if "GRPC" not in name},
        "arguments": [word for word in sys.argv[1:] if not word.isdecimal()],
        "input": os.readlink("/proc/self/fd/0"),
        "errors": os.readlink("/proc/self/fd/2"),
    }
    if "threads" in sys.argv:
        got = threading.Event()
        signal.signal(signal.SIGUSR1, lambda signum, frame: got.set())
        first = threading.main_thread().ident
        other = threading.Thread(target=lambda: signal.pthread_kill(first, signal.SIGUSR1))
        other.start()
        other.join()
        report |= {"signalled": got.wait(10), "random": random.random()}
        report |= {"main thread": threading.get_native_id()}
    print(json.dumps(report), flush=True)
    if "wait" in sys.argv:
        signal.pause()
    sys.exit(7)
"""


def write_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the module `command`, and `preloaded`, which records the process that imported it."""
    (folder / "command.py").write_text(COMMAND)
    (folder / "preloaded.py").write_text("import os\npid = os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


async def forked(
    by: Template, options: Mapping[str, int], *arguments: str
) -> tuple[ForkedChild, dict[str, Any]]:
    """Fork a process; return it and its report."""
    child = await by.fork(arguments, options)
    return child, json.loads(await child.stdout.readline())
