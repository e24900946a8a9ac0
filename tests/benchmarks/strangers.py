"""Speed of a run while strangers hold connections open at every port, with few descriptors.

    python -m tests.benchmarks.strangers [PAIRS]     5 if not given

Two stage servers and a driver with page and metrics, all by TLS and with 256 descriptors each, once
undisturbed and once while each door has 300 silent connections, which are opened again each second
if they are closed. The strangers' own work is done on the same processors. Prints the speed beside
the undisturbed one.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.lan import cli, issue
from tests.support.processes import JobFolder, Running, Server, connect, running

HERE = "127.0.0.1"
DESCRIPTORS = ("prlimit", "--nofile=256:256")
HELD = 300
"""Connections per port."""

AGAIN_SECONDS = 1.0
"""Seconds after which closed connections are opened again."""

WARM_UP, STEPS = 20, 300

JOB = f"""
steps = {WARM_UP + STEPS}
loss = "torch.nn:MSELoss"
num_microbatches = 4
[model]
layers = "rpcmp.tools.bench.models:wide"
num_stages = 2
kwargs = {{ num_stages = 2, width = 1024 }}
[data]
batch_size = 256
[data.train]
callable = "rpcmp.tools.bench.models:vectors"
kwargs = {{ num_samples = 4096, features = 1 }}
"""


@contextlib.contextmanager
def held(ports: Sequence[int]) -> Iterator[None]:
    """Hold silent connections at each port for the length of the block."""
    ended = threading.Event()
    holding = threading.Thread(target=_hold, args=[ports, ended])
    holding.start()
    try:
        yield
    finally:
        ended.set()
        holding.join()


def _hold(ports: Sequence[int], ended: threading.Event) -> None:
    with selectors.DefaultSelector() as open_ones, contextlib.ExitStack() as stack:

        def begin(port: int) -> None:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((HERE, port))
            open_ones.register(one, selectors.EVENT_READ, port)

        for port in ports:
            for _ in range(HELD):
                begin(port)
        while not ended.wait(AGAIN_SECONDS):
            for key, _ in open_ones.select(0):
                open_ones.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()  # it was closed, or cannot be inspected any more
                begin(key.data)


def step_seconds(run: Running) -> float:
    """Return the mean seconds of a step after the first."""
    times = [float(event["time"]) for event in run.wait(300).events if event["event"] == "step"][
        WARM_UP:
    ]
    return (times[-1] - times[0]) / (len(times) - 1)


def trained(config: Path, certs: Path, is_besieged: bool) -> float:
    """Return the seconds of a step of one run."""
    with contextlib.ExitStack() as started:
        servers = []
        for index in range(2):
            options = ("--listen", f"{HERE}:0", "--certs", certs / f"stage{index}")
            run = started.enter_context(
                running("serve", "--stage", str(index), *options, under=DESCRIPTORS)
            )
            servers.append(Server(run, run.wait_for_line(r"SERVING on (\S+)")[1]))
        looking = ("--ui", "0.0.0.0:0", "--metrics", "0.0.0.0:0")
        where = ("--certs", certs / "driver-here", "--connect", connect(servers))
        run = started.enter_context(
            running("drive", config, "--json", *where, *looking, under=DESCRIPTORS)
        )
        run.wait_for_line('"step": 1,')
        urls = re.findall(r"https://[^ ]*?:(\d+)/", "".join(run.err))
        ports = [int(server.address.rpartition(":")[2]) for server in servers]
        if is_besieged:
            started.enter_context(held([*ports, *map(int, urls)]))
        return step_seconds(run)


def main(pairs: int) -> None:
    """Print the speed under strangers beside the undisturbed one, of each pair and of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certs = issue(folder / "certs", HERE, HERE)
        cli(certs, "issue", "--driver", "--name", "driver-here", "--host", HERE)
        config = JobFolder(folder / "job").config(JOB)
        found = []
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            seconds = {state: trained(config, certs, state) for state in order}
            found.append(seconds[False] / seconds[True])
            print(
                f"a step takes {seconds[False] * 1e3:.1f} ms, with strangers "
                f"{seconds[True] * 1e3:.1f}: {found[-1]:.2f} of the speed",
                flush=True,
            )
        print(f"median {statistics.median(found):.3f}, {min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
