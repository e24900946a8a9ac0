"""Children of a fork server that report their own state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment

ONE_THREAD = compute_environment(threads=1)

CHILD = """
import os, signal, sys, threading
import preloaded
from rpcmp.process.channel import connect_to_supervisor

def main():
    bond = connect_to_supervisor()
    bond.channel.send({
        "event": "hello",
        "preloaded_in": preloaded.pid,
        "threads": os.environ["OMP_NUM_THREADS"],
        "group": os.getpgid(0),
        "path": sys.path,
        "read": [os.read(fd, 10).decode() for fd in bond.fds],
        "open": [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2],
        "default": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    })
    order = bond.channel.receive()
    if order is None:
        os._exit(1)
    match order["op"]:
        case "exit":
            sys.exit(order["code"])
        case "raise":
            raise RuntimeError("planted")
        case "hang":
            threading.Event().wait()

if __name__ == "__main__":
    main()
"""


def write_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the module `child`, and `preloaded`, which records the process that imported it."""
    (folder / "child.py").write_text(CHILD)
    (folder / "preloaded.py").write_text("import os\npid = os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def forks() -> Forks:
    return Forks(["preloaded"])


async def spawn(
    forks: Forks | None, fds: list[int] | None = None, environment: Mapping[str, str] = ONE_THREAD
) -> tuple[Child, dict[str, object]]:
    """Start a child; return it and its report."""
    child = await Child.spawn("child", environment, None, fds or [], forks)
    return child, await anext(child.messages())


async def end(child: Child) -> None:
    child.send({"op": "exit", "code": 0})
    assert await child.wait() == 0
    await child.kill()
