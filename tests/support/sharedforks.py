"""Fork servers that the jobs of many tests share: each would import torch for 4 s of CPU.

    pytest ──starts once──> fork server     python -P tests/support/sharedforks.py FD drive CONFIG
       └──a line for each command───────────────> rpcmp drive, whose `Forks` takes that line

They fork the same processes in the same way as a command's own fork server: a stage server that
`rpcmp drive` starts gets such a line as well. Only the parent of the fork server differs, and so do
the environment and standard error that its children inherit. Tests of these use the fixture
`own_forks`. The first fork server imports torch, and the others are forks of it.

Every fork server has its own network, as always. A job that starts its stage servers itself is in
one network, and each lasting stage server in another. So a network has either all processes of a
job, or one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from rpcmp.process.fork_client import DRIVERS, MAX_BYTES, WORKERS, Forks
from rpcmp.process.interpreter import compute_environment

BEFORE = dict(os.environ)
"""The environment before any test: shared servers must not inherit from the first test."""

DRIVE = "drive"
"""The fork server of drivers, and of the servers that they start."""

IMPORTED_LATER = ("sympy",)
"""What torch imports in each process that cuts, compiles or sizes layers: 0.6 s of CPU."""

MODELS = ("transformers.modeling_utils", "peft")
"""What each process imports that has a model of theirs: 4 s of CPU. Tests that need the system have
many such jobs, the others few.
"""

STARTED: set[int] = set()
"""The process ids of all fork servers of this process, those of a pretend accelerator as well."""


def adopted(line: socket.socket) -> socket.socket:
    """Open another line to the fork server at the other end of `line`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(line, [b'{"op": "adopt"}'], [theirs.fileno()])
    return ours


def ask_for_fork(line: socket.socket, module: str, *fds: int) -> None:
    """Ask the fork server at the other end of `line` for a process that runs a module."""
    order = {"op": "fork", "module": module, "file_access": None, "scratch": ""}
    socket.send_fds(line, [json.dumps(order).encode()], fds)


def children_of(pid: int) -> list[psutil.Process]:
    """Return a process's children from the kernel's list; psutil would scan all processes."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            pids = (task / "children").read_text().split()
            found += [psutil.Process(int(each)) for each in pids]
    return found


class SharedForks:
    """A fork server that starts on first use and ends with this process.

    Args:
        without: an environment variable that the fork server does not get.
        more: variables that it gets besides.
        imports: modules that it imports besides those of workers and drivers.
        first: a fork server to fork from, which has done the imports; None: it imports by itself.
    """

    def __init__(
        self,
        without: str,
        more: Mapping[str, str],
        imports: Sequence[str],
        first: SharedForks | None = None,
    ) -> None:
        self._without, self._more, self._imports = without, more, imports
        self._first = first
        self._birth: socket.socket | None = None  # a fork ends with the line that requested it
        self._process: psutil.Process | None = None
        self._line: socket.socket | None = None
        self._err = tempfile.TemporaryFile()  # noqa: SIM115

    def standard_error(self) -> bytes:
        """Return what the fork server and its forks have written to standard error."""
        size = os.fstat(self._err.fileno()).st_size
        return os.pread(self._err.fileno(), size, 0)

    def line(self) -> socket.socket:
        """Return a new line; processes that are forked by it end when it is closed."""
        if self._line is None or not self._is_alive():
            self._start()
        assert self._line is not None
        return adopted(self._line)

    @property
    def pid(self) -> int | None:
        """The process id of the fork server; None before it starts."""
        return None if self._process is None else self._process.pid

    def children(self) -> list[psutil.Process]:
        """Return the forked processes that still run."""
        return children_of(self._process.pid) if self._process and self._is_alive() else []

    def close(self) -> None:
        """Stop the fork server and all its forks."""
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()
            if self._birth is not None:
                self._birth.close()

    def _is_alive(self) -> bool:
        return (
            self._process is not None
            and self._process.is_running()
            and self._process.status() != psutil.STATUS_ZOMBIE
        )

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._new(theirs) if self._first is None else self._fork(theirs)
        STARTED.add(self._process.pid)
        self._line = ours

    def _fork(self, theirs: socket.socket) -> psutil.Process:
        assert self._first is not None
        self._birth = self._first.line()
        ask_for_fork(self._birth, "tests.support.moreforks", theirs.fileno(), self._err.fileno())
        return psutil.Process(json.loads(self._birth.recv(MAX_BYTES))["pid"])

    def _new(self, theirs: socket.socket) -> psutil.Process:
        environment = {key: value for key, value in BEFORE.items() if key != self._without}
        environment |= self._more
        arguments = [str(theirs.fileno()), str(os.getpid()), "", WORKERS, DRIVERS, *self._imports]
        return psutil.Popen(
            [sys.executable, "-P", "-m", "rpcmp.process", *arguments],
            env={**environment, **compute_environment(threads=1), "SPT_NOENV": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=self._err,
            start_new_session=True,
        )


class SharedByAll:
    """All shared fork servers: DRIVE, and one per long-lived stage server.

    Args:
        without, more: see SharedForks.

    Attributes:
        in_use: whether the jobs of this test share them.
        imports: what fork servers import besides; changes count until the first one starts.
    """

    def __init__(self, without: str, more: Mapping[str, str] | None = None) -> None:
        self.in_use = True
        self.imports = [*IMPORTED_LATER]
        self._environment = without, more or {}
        self._all: dict[str, SharedForks] = {}
        # Fork servers end with the thread that started them, so this thread must outlive them.
        self._starter = ThreadPoolExecutor(1, "shared-forks")

    def line(self, owner: str) -> socket.socket | None:
        """Return a line to a fork server, or None if nothing is shared."""
        return self.line_of(owner) if self.in_use else None

    def line_of(self, owner: str) -> socket.socket:
        """Return a line to a fork server, even if jobs of this test do not share it."""
        about = (*self._environment, self.imports)
        first = self._all.setdefault(DRIVE, SharedForks(*about))
        forks = self._all.setdefault(owner, SharedForks(*about, first))
        return self._starter.submit(forks.line).result()

    @property
    def pids(self) -> set[int]:
        """The process ids of the started fork servers."""
        return {each.pid for each in self._all.values() if each.pid is not None}

    def children(self) -> list[psutil.Process]:
        """Return the running processes that any of the fork servers has forked."""
        own, forked = self.pids, [c for each in self._all.values() for c in each.children()]
        return [child for child in forked if child.pid not in own]

    def standard_error(self) -> dict[str, bytes]:
        """Return the standard error of each fork server and its forks."""
        return {owner: each.standard_error() for owner, each in self._all.items()}

    def close(self) -> None:
        """Stop all fork servers and their forks."""
        for each in reversed(self._all.values()):  # the first one last: the others are forks of it
            each.close()


def borrowing(lend: Callable[[], socket.socket | None]) -> Callable[..., None]:
    """Return a constructor of Forks that uses the lent line, if any, to fork driver processes."""
    construct = Forks.__init__

    def borrow(
        self: Forks,
        preloaded: Sequence[str],
        line: socket.socket | None = None,
        lender: socket.socket | None = None,
    ) -> None:
        lent = lend() if line is None and DRIVERS in preloaded else line
        construct(self, preloaded, lent, lender)

    return borrow


def main() -> None:
    """Run a command of rpcmp with a line; its descriptor is the first argument."""
    from rpcmp.cli import main as run

    line = socket.socket(fileno=int(sys.argv.pop(1)))
    os.set_inheritable(line.fileno(), False)
    Forks.__init__ = borrowing(lambda: adopted(line))  # type: ignore[method-assign]
    sys.argv[0] = "rpcmp"
    run()


if __name__ == "__main__":
    main()
