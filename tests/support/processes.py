"""Real processes for tests: started, polled for conditions, and ended by the same test."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import psutil
import pytest

from rpcmp import cli
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support import sharedforks
from tests.support.needs import needs, needs_root
from tests.support.places import EXAMPLES, ZOO
from tests.support.reaper import TOKEN, carrying
from tests.support.sharedforks import DRIVE, SharedByAll

DEADLINE = 60.0
FORKS = SharedByAll(without=TOKEN)


SHARING = ("drive", "explain", "verify")
"""Commands that may fork by a line of FORKS."""


def poll_for(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
    """Wait until `condition()` is true, and return its value."""
    ends = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > ends:
            raise AssertionError(f"waited {timeout:.0f} s for {what}")
        pause.wait(0.02)
    return value


NO_NETWORKS = "no network namespace can be made"
"""The warning of a run if the kernel, or a container's profile, creates no network namespaces."""


MAKES_A_NETWORK = """
import ctypes, fcntl, socket, struct
USER, NETWORK, SET_FLAGS, UP = 0x10000000, 0x40000000, 0x8914, 1
unshare = ctypes.CDLL(None).unshare
made = unshare(NETWORK) == 0 or unshare(USER | NETWORK) == 0
if made:  # some kernels create one without any rights in it
    fcntl.ioctl(socket.socket(), SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
raise SystemExit(not made)
"""


@functools.cache
def makes_networks() -> bool:
    """Return whether the kernel lets this user create network namespaces.

    This does not use rpcmp's code.
    """
    command = [sys.executable, "-c", MAKES_A_NETWORK]
    return subprocess.run(command, capture_output=True).returncode == 0


def without_network_warning(text: str, *begins: str) -> str:
    """Remove the warning of a machine that cannot create network namespaces.

    Args:
        begins: prefixes that the line may have; empty: any prefix.
    """
    if NO_NETWORKS not in text or makes_networks():
        return text
    lines = text.splitlines(True)
    return "".join(x for x in lines if not (NO_NETWORKS in x and x.startswith(begins or "")))


def with_token(token: str) -> list[psutil.Process]:
    """Return the living processes, except this one, with this token prefix in their environment."""
    found = []
    for pid in carrying(token):
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid != os.getpid():
                found.append(psutil.Process(pid))
    return found


def require_ended(left: Callable[[], list[psutil.Process]], what: str) -> None:
    """Wait until all processes have ended, or kill the remaining ones and fail."""
    try:
        poll_for(lambda: not left(), f"{what} to end")
    finally:
        for process in left():
            process.kill()


@dataclass
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines of the standard output."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def event(self, name: str) -> dict[str, Any]:
        """Return the last event with that name."""
        return [event for event in self.events if event["event"] == name][-1]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events if event["event"] == "step"]


def result_on_any_machine(code: int, out: str, err: str) -> Result:
    """Return a result that does not depend on the kernel of this machine."""
    return Result(
        code, without_network_warning(out, "warning: ", '{"event": "'), without_network_warning(err)
    )


def unstamped(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without its time."""
    return {key: value for key, value in event.items() if key not in ("time", "generation")}


class Watched(ABC):
    """A command whose standard output is read while it runs."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the lines of output so far."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the output is complete."""

    @abstractmethod
    def result(self) -> Result:
        """Return the exit code and output, or the output so far while it runs."""

    def wait_for_line(self, pattern: str, timeout: float = DEADLINE) -> re.Match[str]:
        """Wait for the first line of standard output that matches."""

        def found() -> re.Match[str] | None:
            has_ended = self.has_ended()  # must be read before the lines
            for line in self.lines():
                if match := re.search(pattern, line):
                    return match
            if has_ended:
                raise AssertionError(f"ended without {pattern!r}: {self.result()}")
            return None

        match: re.Match[str] = poll_for(found, f"a line like {pattern!r}", timeout)
        return match


@dataclass
class Running(Watched):
    """A running command; its output is collected as it arrives."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[str]:
        """See Watched."""
        return list(self.out)

    def has_ended(self) -> bool:
        """See Watched."""
        return self.process.poll() is not None and not any(r.is_alive() for r in self.readers)

    def wait(self, timeout: float = DEADLINE) -> Result:
        """Wait until the command ends by itself."""
        self.process.wait(timeout)
        for reader in self.readers:
            reader.join(timeout)
        return self.result()

    def result(self) -> Result:
        out, err = ("".join(lines) for lines in (self.out, self.err))
        return result_on_any_machine(self.process.returncode, out, err)


class RunningHere(Watched):
    """A command that runs in this process, as seen from another thread.

    Attributes:
        out, err: its output so far.
    """

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.code: int | None = None

    def lines(self) -> list[str]:
        """See Watched."""
        return self.out.getvalue().splitlines()

    def has_ended(self) -> bool:
        """See Watched."""
        return self.code is not None

    def signal(self, signum: signal.Signals) -> None:
        """Send this process a signal that the command handles."""
        assert self.code is None, f"it has ended: {self.result()}"
        os.kill(os.getpid(), signum)

    def result(self) -> Result:
        """See Watched."""
        code = -1 if self.code is None else self.code
        return result_on_any_machine(code, self.out.getvalue(), self.err.getvalue())


@contextlib.contextmanager
def running(
    *command: str | Path,
    cwd: Path | None = None,
    under: Sequence[str] = (),
    shares: bool | None = None,
    as_typed: bool = False,
) -> Iterator[Running]:
    """Start `rpcmp COMMAND...`; interrupt and then kill it if it still runs at the end.

    Args:
        under: a program and its arguments that runs the command.
        shares: whether its job forks by a line of FORKS; None: unless `under` is given.
        as_typed: whether to leave out the options that tests add to a command.
    """
    if shares is None:
        shares = not under
    with program(shares=shares and command[0] in SHARING) as (rpcmp, fds):
        options = command if as_typed else _in_a_test(*command)
        run = _start([*under, *rpcmp, *map(str, options)], fds, cwd)
    with _ended(run):
        yield run


@contextlib.contextmanager
def program(shares: bool = True) -> Iterator[tuple[list[str], list[int]]]:
    """Yield a command that runs `rpcmp` in its own process, and the descriptors to inherit.

    Args:
        shares: whether its jobs fork by a line of FORKS, if there is one.
    """
    with _line(DRIVE if shares else "") as fds:
        shared = ["-P", sharedforks.__file__, *map(str, fds)]
        yield [sys.executable, *(shared if fds else ["-m", "rpcmp"])], fds


def _in_a_test(*command: str | Path) -> tuple[str | Path, ...]:
    """Add options: no run folder in the repository, and any checkpoint folder for a server."""
    if command[0] == "drive" and EXAMPLES in Path(command[1]).parents:
        return (*command, "--set", "log.folder=")
    if command[0] == "serve" and "--checkpoints" not in command:
        return (*command, "--checkpoints", "/")
    return command


@contextlib.contextmanager
def _line(owner: str) -> Iterator[list[int]]:
    """Yield the descriptor of a line to FORKS, or none if nothing is shared."""
    line = FORKS.line(owner) if owner else None
    if line is None:
        yield []
        return
    with line:
        yield [line.fileno()]


def _start(command: Sequence[str | Path], fds: Sequence[int], cwd: Path | None) -> Running:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        pass_fds=fds,
        start_new_session=True,
    )
    run = Running(process)
    for stream, lines in ((process.stdout, run.out), (process.stderr, run.err)):
        reader = threading.Thread(target=lines.extend, args=[stream], daemon=True)
        run.readers.append(reader)
        reader.start()
    return run


@contextlib.contextmanager
def _ended(run: Running) -> Iterator[None]:
    """Interrupt, and then kill, a process that still runs at the end."""
    process = run.process
    try:
        yield
    finally:
        for signum in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        for reader in run.readers:
            reader.join(10)


@contextlib.contextmanager
def no_more_files(process: psutil.Process | None = None) -> Iterator[None]:
    """Let a process, this one by default, open no more files."""
    pid = os.getpid() if process is None else process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lowest_free = next(
        fd for fd in itertools.count() if not os.path.lexists(f"/proc/{pid}/fd/{fd}")
    )
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def runs(process: psutil.Process, what: str) -> bool:
    """Return whether a process has this word in its command line.

    Examples are "serve", "rpcmp.worker" and "rpcmp.driver".
    """
    return what in " ".join(process.cmdline()).split()


def forked(what: str) -> list[psutil.Process]:
    """Return processes of a kind, see `runs`, that shared fork servers have forked."""
    return [process for process in FORKS.children() if runs(process, what)]


def rpcmp(*command: str | Path, during: Callable[[RunningHere], object] | None = None) -> Result:
    """Run `rpcmp COMMAND...` to its end in this process.

    This saves an interpreter and its imports; `rpcmp_process` runs it in a process of its own. Its
    job, if any, has stage servers of the pool; see tests.support.pool.

    Args:
        during: called in another thread while the command runs. An exception in it ends the
            command, and is raised here.
    """
    run = RunningHere()
    levels = {name: logging.getLogger(name).level for name in (None, "rpcmp")}
    with (
        contextlib.redirect_stdout(run.out),
        contextlib.redirect_stderr(run.err),
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        own_modules(),
        _beside(run, during),
    ):
        patch.setattr(sys, "argv", ["rpcmp", *map(str, _in_a_test(*command))])
        try:
            run.code = cli._run()
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
    return run.result()


@contextlib.contextmanager
def own_modules() -> Iterator[None]:
    """Forget the modules of the job's folder: the next job may use the same names."""
    path = [*sys.path]
    try:
        yield
    finally:
        folders = tuple(f"{folder}{os.sep}" for folder in sys.path if folder not in path)
        sys.path[:] = path
        for name, module in [*sys.modules.items()]:
            if folders and (getattr(module, "__file__", None) or "").startswith(folders):
                del sys.modules[name]


@contextlib.contextmanager
def _beside(run: RunningHere, during: Callable[[RunningHere], object] | None) -> Iterator[None]:
    if during is None:
        yield
        return
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            during(run)
        except BaseException as error:
            failed.append(error)
            for _ in range(2):  # the second signal ends a slow shutdown
                if run.code is None:
                    run.signal(signal.SIGINT)
                    time.sleep(1.0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        if not failed:
            raise
    finally:
        if run.code is None:
            run.code = -1
        watcher.join(DEADLINE)
    if failed:
        raise failed[0]
    assert not watcher.is_alive(), "what is done beside the command does not end"


def rpcmp_process(*command: str | Path, timeout: float = 120.0) -> Result:
    """Run `rpcmp COMMAND...` to its end in its own process."""
    with running(*command) as run:
        return run.wait(timeout)


@dataclass
class Server:
    """A running `rpcmp serve`."""

    run: Running
    address: str

    @property
    def pid(self) -> int:
        return self.run.pid


@contextlib.contextmanager
def running_servers(num_stages: int, *options: str, apart: bool = True) -> Iterator[list[Server]]:
    """Start one stage server per stage, on free ports.

    Args:
        apart: whether each server has a network of its own, as on a host of its own; otherwise all
            are in the drivers' network.
    """
    with contextlib.ExitStack() as stack:
        runs = []
        for index in range(num_stages):
            place = ("--stage", str(index), "--listen", "127.0.0.1:0")
            owner = f"stage {index}" if apart else DRIVE
            runs.append(stack.enter_context(_serving(owner, *place, *options)))
        yield [Server(run, run.wait_for_line(r"SERVING on (\S+)")[1]) for run in runs]


@contextlib.contextmanager
def running_server(
    *options: str | Path, owner: str = DRIVE, under: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a stage server with `rpcmp serve OPTIONS...`.

    Args:
        owner: selects the fork server and network of its workers; see FORKS.
        under: a program and its arguments that runs the server, but not its workers.
    """
    with _serving(owner, *options, under=under) as run:
        yield Server(run, run.wait_for_line(r"SERVING on (\S+)")[1])


@contextlib.contextmanager
def _serving(owner: str, *options: str | Path, under: Sequence[str] = ()) -> Iterator[Running]:
    with _line(owner) as fds:
        shared = [part for fd in fds for part in ("--forks", str(fd))]
        command = ["-m", "rpcmp", *_in_a_test("serve", *shared, *options)]
        run = _start([*under, sys.executable, *command], fds, None)
    with _ended(run):
        yield run


class Addressed(Protocol):
    """A server with an address."""

    @property
    def address(self) -> str:
        """Host and port."""


def connect(servers: Sequence[Addressed]) -> str:
    """Return the value of --connect for `servers`."""
    return ",".join(server.address for server in servers)


def describe(server: Addressed) -> pb.DescribeResponse:
    """Ask a server for its description."""
    with grpc.insecure_channel(server.address) as channel:
        return ControlStub(channel).Describe(pb.DescribeRequest(), timeout=10)


def status(config: Path, servers: Sequence[Addressed]) -> list[dict[str, Any]]:
    """Return the output of `rpcmp status --json`."""
    result = rpcmp("status", config, "--json", "--connect", connect(servers))
    stages: list[dict[str, Any]] = json.loads(result.out)["stages"]
    return stages


class JobFolder:
    """A folder with configs and the test models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"))

    def config(self, text: str, name: str = "job.toml") -> Path:
        """Write a config; defaults of a small job supply what `text` omits."""
        path = self.folder / name
        defaults = {
            "loss": 'loss = "torch.nn:MSELoss"',
            "steps": "steps = 2",
            "num_microbatches": "num_microbatches = 4",
        }
        head = [line for key, line in defaults.items() if not re.search(rf"(?m)^\s*{key} ?=", text)]
        data = '[data]\ntrain = "zoo:regression"\nbatch_size = 10\n'
        tail = [] if re.search(r"(?m)^\s*\[data\]", text) else [data]
        path.write_text("\n".join([*head, text, *tail]))
        return path


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a disk of `size` at `folder`."""
    needs_root("mount a disk")
    folder.mkdir()
    subprocess.run(
        [needs("mount"), "-t", "tmpfs", "-o", f"size={size}", "rpcmp", folder], check=True
    )
    try:
        yield
    finally:
        subprocess.run([needs("umount"), folder], check=True)
