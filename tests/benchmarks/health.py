"""Time until a stage server is ready, and until it answers health checks while both cores train.

python -m tests.benchmarks.health
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import JobFolder, connect, running, running_servers

CHECKS = 100
STARTS = 10

BUSY_JOB = """
steps = 1000000
[model]
layers = "zoo:mlp"
kwargs = { blocks = 200 }
num_stages = 2
[data]
train = { callable = "zoo:regression", kwargs = { samples = 4000 } }
batch_size = 2000
"""


def start_seconds() -> list[float]:
    """Return the seconds from starting `rpcmp serve` to its line with SERVING."""
    seconds = []
    for _ in range(STARTS):
        started = time.perf_counter()
        with running_servers(1):
            seconds.append(time.perf_counter() - started)
    return seconds


def check_seconds(address: str) -> list[float]:
    """Return the seconds of each health check."""
    seconds = []
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(CHECKS):
            started = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            seconds.append(time.perf_counter() - started)
    return seconds


def show(what: str, seconds: list[float]) -> None:
    """Format the median and the maximum, in milliseconds."""
    median, worst = statistics.median(seconds), max(seconds)
    print(f"{what}: median {median * 1e3:.1f} ms, worst {worst * 1e3:.1f} ms of {len(seconds)}")


def main() -> None:
    """Print both figures."""
    show("serve until SERVING", start_seconds())
    with tempfile.TemporaryDirectory() as folder, running_servers(2) as servers:
        config = JobFolder(Path(folder) / "job").config(BUSY_JOB)
        with running("drive", config, "--connect", connect(servers), "--json") as run:
            run.wait_for_line('"step": 3')
            show("health check while training", check_seconds(servers[0].address))


if __name__ == "__main__":
    main()
