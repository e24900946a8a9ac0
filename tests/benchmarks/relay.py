"""Speed of the relay: bytes through two relays on this machine, by mutual TLS.

    python -m tests.benchmarks.relay [GIGABYTES [ROUNDS]]     2 and 5 if not given
    python -m tests.benchmarks.relay steps [ROUNDS]           a step of `digits`, TLS / plain; 9

source ──loopback──> relay ══TLS══> relay ──loopback──> sink, each a process of its own; in turn
with the same without TLS, with no relay at all, and with the relays of `relay_floor`, which do as
little as they can. Medians of the rounds: bytes per second, and the CPU seconds per GB of all four
processes together, which are the same on a busy machine. Two cores have two such seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rpcmp.net.identity import RELAY, TlsState
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.security import Credentials
from rpcmp.net.tunnel import splice
from rpcmp.tools.measurement import paired_ratio
from tests.benchmarks import relay_floor
from tests.support.lan import issue
from tests.support.places import EXAMPLES

HERE = "127.0.0.1"
ROUNDS = 5
BLOCK = 4 * 2**20

WAYS = {
    "no relay": "",
    "plain relays": "plain",
    "mutual TLS": "tls",
    "floor, plain": "floor-plain",
    "floor, TLS in memory": "floor-memory",
    "floor, TLS sockets": "floor-sockets",
    "floor, frames without TLS": "floor-frames",
}


class Measured(NamedTuple):
    """Gigabytes per second, and CPU seconds per gigabyte."""

    rate: float
    cpu: float


def cpu_seconds() -> float:
    """Return the CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def context(side: str, certs: Path) -> ssl.SSLContext:
    if side == "near":
        return Credentials(certs / "driver").client(RELAY)
    return Credentials(certs / "stage0").server()


async def ours(
    side: str, way: str, worker: socket.socket, link: socket.socket, certs: Path
) -> float:
    """Carry by our relay; return the CPU seconds."""
    name = HERE if side == "near" else None
    session = TlsState(context(side, certs), name) if way == "tls" else None
    other = PeerConnection(link, session)
    await other.do_handshake()
    other.has_frames = True
    began = cpu_seconds()
    await splice(PeerConnection(worker), other)
    return cpu_seconds() - began


def prepare(
    side: str, way: str, worker: socket.socket, link: socket.socket, certs: Path
) -> Callable[[], None]:
    """Return a function that carries by one of the floors, after the handshake."""
    is_near = side == "near"
    name = HERE if is_near else None
    if way == "floor-plain":
        return lambda: relay_floor.plain(*((worker, link) if is_near else (link, worker)))
    if way == "floor-sockets":
        secure = relay_floor.handshake(context(side, certs), link, name)
        if is_near:
            return lambda: relay_floor.plain(worker, secure)
        return lambda: relay_floor.gathered(secure, worker)
    end = (
        relay_floor.Memory(context(side, certs), link, name)
        if way == "floor-memory"
        else relay_floor.Frames()
    )
    return lambda: end.encrypt(worker, link) if is_near else end.decrypt(link, worker)


def relay(side: str, way: str, port: int, certs: Path) -> None:
    """Run a relay for one connection; prints its port, and at the end its CPU seconds."""
    with socket.create_server((HERE, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    onward = socket.create_connection((HERE, port))
    for each in (connection, onward):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    worker, link = (connection, onward) if side == "near" else (onward, connection)
    if not way.startswith("floor"):
        used = asyncio.run(ours(side, way, worker, link, certs))
    else:
        carry, began = prepare(side, way, worker, link, certs), cpu_seconds()
        carry()
        used = cpu_seconds() - began
    print(used, flush=True)


class Process:
    """A process of this module; `port` is where it listens."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.relay", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.read())

    def read(self) -> float:
        """Return the next number that it prints."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())


def sink(size: int) -> None:
    """Receive bytes from one connection; prints the port, the seconds, and the CPU seconds."""
    with socket.create_server((HERE, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    buffer, taken = bytearray(2**20), connection.recv_into(bytearray(1))
    began, used = time.perf_counter(), cpu_seconds()
    while taken < size:
        taken += connection.recv_into(buffer)
    print(time.perf_counter() - began, flush=True)
    connection.close()
    print(cpu_seconds() - used, flush=True)


def measure(size: int, way: str, certs: Path) -> Measured:
    """Send `size` bytes one way."""
    end = Process("sink", size)
    relays: list[Process] = []
    port = end.port
    for side in ("far", "near") if way else ():
        relays.insert(0, Process(side, way, port, certs))
        port = relays[0].port
    block = bytes(BLOCK)
    began = cpu_seconds()
    with socket.create_connection((HERE, port)) as source:
        for _ in range(0, size, BLOCK):
            source.sendall(block)
        source.shutdown(socket.SHUT_WR)
        seconds = end.read()
    used = cpu_seconds() - began + end.read() + sum(each.read() for each in relays)
    for each in (end, *relays):
        each.process.wait()
    return Measured(size / seconds / 1e9, used / size * 1e9)


def compare(total: int, rounds: int) -> None:
    """Measure all ways in turn, and print medians."""
    with tempfile.TemporaryDirectory() as folder:
        certs = issue(Path(folder) / "certs", HERE)
        found: dict[str, list[Measured]] = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, way in WAYS.items():
                found[name].append(measure(total, way, certs))
    for name, all_measured in found.items():
        rates = [each.rate for each in all_measured]
        cpu = statistics.median(each.cpu for each in all_measured)
        print(
            f"{name}: {statistics.median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}), "
            f"{cpu:.2f} s of CPU per GB"
        )


def steps(rounds: int) -> None:
    """Compare a step of `digits` by mutual TLS with one by relays without it, in turns."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        certs = issue(Path(folder) / "certs", HERE, HERE)
        ways = []
        for name in (None, certs):
            servers = [
                started.enter_context(_serving(index, name and name / f"stage{index}"))
                for index in range(2)
            ]
            own = () if name is None else ("--certs", str(name / "driver"))
            ways.append(["--connect", ",".join(servers), *own])
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(-1, rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                seconds = _seconds_a_step(ways[side], Path(folder))
                if number >= 0:  # their fork servers start with the first job
                    found[side].append(seconds)
    plain, tls = found
    ratio, seconds = paired_ratio(tls, plain), statistics.median(tls)
    print(
        f"digits, TLS / plain: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), "
        f"{seconds * 1e3:.1f} ms a step"
    )


@contextlib.contextmanager
def _serving(index: int, certs: Path | None) -> Iterator[str]:
    command = ["serve", "--stage", str(index), "--listen", f"{HERE}:0", "--data", str(EXAMPLES)]
    own = () if certs is None else ("--certs", str(certs))
    command = [sys.executable, "-m", "rpcmp", *command, *own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            yield run.stdout.readline().split()[-1]
        finally:
            run.terminate()


def _seconds_a_step(way: list[str], folder: Path) -> float:
    fixed = ("schedule=1f1b", "max_in_flight=4", "microbatches_per_message=1", "log.folder=")
    options = [word for key in fixed for word in ("--set", key)]
    command = [sys.executable, "-m", "rpcmp", "drive", str(EXAMPLES / "digits.toml"), "--json"]
    done = subprocess.run(
        [*command, *options, *way], cwd=folder, check=True, capture_output=True, text=True
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    seconds: list[float] = [each["step_s"] for each in events if each["event"] == "step"]
    return statistics.median(seconds)


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    match sys.argv[1:]:
        case ["sink", size]:
            sink(int(size))
        case [("near" | "far") as side, way, port, certs]:
            relay(side, way, int(port), Path(certs))
        case ["steps", *given]:
            steps(int(given[0]) if given else 9)
        case given:
            gigabytes, rounds = (*given, *("2", str(ROUNDS))[len(given) :])
            compare(int(float(gigabytes) * 1e9) // BLOCK * BLOCK, int(rounds))


if __name__ == "__main__":
    main()
