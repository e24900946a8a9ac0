"""Where the jobs of chaos go on: this machine, stage servers, hosts with certificates."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.lan import Host, issue, lan
from tests.support.processes import running
from tests.support.reaper import TOKEN

PLACES = ("here", "servers", "hosts")

START_SECONDS = 30.0

STOP_SECONDS = 40.0

RESTART_SECONDS = 0.3
"""After which a server or `drive` is started again."""


class Server:
    """A stage server that is started again when it has ended.

    Attributes:
        pid: of the running one.
        idle: descriptors that it had after its first run, by process.
    """

    def __init__(self, options: Sequence[str], listen: str, under: Sequence[str]) -> None:
        self._options, self._under = options, under
        self.address = listen
        self.pid = 0
        self.output: list[str] = []
        self.idle: dict[int, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._serves = threading.Event()

    def start(self) -> None:
        self._thread.start()
        if not self._serves.wait(START_SECONDS):
            raise AssertionError(f"a stage server does not start: {''.join(self.output)}")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            options = [*self._options, "--listen", self.address]
            with running("serve", *options, under=self._under, shares=False) as run:
                run.err = self.output
                self.pid = run.pid
                while not run.has_ended() and not self._closing.is_set():
                    if not self._serves.is_set() and (lines := run.lines()):
                        self.address = lines[0].split("SERVING on ")[1].split()[0]
                        self._serves.set()
                    self._closing.wait(0.05)
            self._closing.wait(RESTART_SECONDS)


@dataclass
class Place:
    """Where runs go on.

    Attributes:
        token: in the environment of all processes.
        hosts: the driver's first; empty: this machine alone.
        servers: of each worker; empty: `drive` starts its own.
        options: of `drive`.
    """

    token: str
    hosts: list[Host] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    def under(self) -> tuple[str, ...]:
        return self.hosts[0].inside if self.hosts else ()


@contextlib.contextmanager
def place_of(kind: str, workers: Sequence[tuple[int, int]], folder: Path) -> Iterator[Place]:
    """Start what a place needs: hosts, certificates, stage servers."""
    with contextlib.ExitStack() as stack:
        place = Place(os.environ[TOKEN])
        where = [["--stage", str(stage), "--replica", str(replica)] for stage, replica in workers]
        more = ["--checkpoints", "/"]
        if kind == "servers":
            place.servers = [Server([*each, *more], "127.0.0.1:0", ()) for each in where]
        elif kind == "hosts":
            place.hosts = stack.enter_context(lan(1 + len(workers), folder))
            certs = issue(folder / "certs", *(host.name for host in place.hosts[1:]))
            place.options = ["--certs", str(certs / "driver")]
            for host, each, (stage, _) in zip(place.hosts[1:], where, workers, strict=True):
                options = [*each, *more, "--certs", str(certs / f"stage{stage}")]
                place.servers.append(Server(options, f"{host.name}:50051", host.inside))
        for server in place.servers:
            stack.callback(server.close)
            server.start()
        if place.servers:
            addresses = ",".join(server.address for server in place.servers)
            place.options += ["--connect", addresses]
        yield place
