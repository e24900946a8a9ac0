"""Speed of the relay: bytes through two relays on this machine, by mutual TLS.

    python -m tests.benchmarks.relay [GIGABYTES]

source ──loopback──> relay ══TLS══> relay ──loopback──> sink, each a process of its own; in turn
with the same without TLS, and with no relay at all. The median of five rounds.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rpcmp.net.identity import RELAY, TlsState
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.security import Credentials
from rpcmp.net.tunnel import splice
from tests.support.lan import issue

HERE = "127.0.0.1"
ROUNDS = 5
BLOCK = 4 * 2**20


async def relay(side: str, port: int, certs: str) -> None:
    """Run a relay for one connection; prints its port."""
    loop = asyncio.get_running_loop()
    with socket.create_server((HERE, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        listener.setblocking(False)
        connection, _ = await loop.sock_accept(listener)
    onward = socket.create_connection((HERE, port))
    folder = Path(certs)
    if side == "near":
        session = TlsState(Credentials(folder / "driver").client(RELAY), HERE) if certs else None
        plain, other = PeerConnection(connection), PeerConnection(onward, session)
    else:
        session = TlsState(Credentials(folder / "stage0").server()) if certs else None
        plain, other = PeerConnection(onward), PeerConnection(connection, session)
    await other.do_handshake()
    other.has_frames = True
    await splice(plain, other)


def start(side: str, port: int, certs: str) -> tuple[subprocess.Popen[str], int]:
    """A relay that passes on to a port; and its own."""
    command = [sys.executable, "-m", "tests.benchmarks.relay", side, str(port), certs]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def sink(size: int) -> None:
    """Receive bytes from one connection; prints the port, and then the seconds."""
    with socket.create_server((HERE, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    buffer, taken = bytearray(2**20), connection.recv_into(bytearray(1))
    began = time.perf_counter()
    while taken < size:
        taken += connection.recv_into(buffer)
    print(time.perf_counter() - began, flush=True)


def measure(size: int, relays: int, certs: str) -> float:
    """Return gigabytes per second."""
    command = [sys.executable, "-m", "tests.benchmarks.relay", "sink", str(size)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True)]
    stdout = processes[0].stdout
    assert stdout is not None
    port = int(stdout.readline())
    for side in ("far", "near")[:relays]:
        process, port = start(side, port, certs)
        processes.append(process)
    block = bytes(BLOCK)
    with socket.create_connection((HERE, port)) as source:
        for _ in range(0, size, BLOCK):
            source.sendall(block)
        seconds = float(stdout.readline())
    for process in processes:
        process.wait()
    return size / seconds / 1e9


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    match sys.argv[1:]:
        case ["sink", size]:
            sink(int(size))
        case [("near" | "far") as side, port, certs]:
            asyncio.run(relay(side, int(port), certs))
        case given:
            total = int(float(given[0] if given else 2) * 1e9) // BLOCK * BLOCK
            with tempfile.TemporaryDirectory() as folder:
                certs = str(issue(Path(folder) / "certs", HERE))
                ways = {"no relay": (0, ""), "plain relays": (2, ""), "mutual TLS": (2, certs)}
                found: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(ROUNDS):
                    for way, (relays, where) in ways.items():
                        found[way].append(measure(total, relays, where))
            for way, rates in found.items():
                low, middle, high = min(rates), statistics.median(rates), max(rates)
                print(f"{way}: {middle:.2f} GB/s ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
