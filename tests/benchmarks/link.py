"""Share of a slow link that a run uses if activations take most of its time.

    python -m tests.benchmarks.link [RATE] [ROUNDS]     "1gbit" and 5 if not given

A driver and two stages on three hosts, by mutual TLS, with so much bandwidth on each cable. Bytes
are those that the kernel has counted on stage 0's cable, TLS and TCP included, so that the rate is
the most there could be. Both ways carry as much: activations there, gradients back.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.lan import Host, driving, issue, lan, serving
from tests.support.processes import JobFolder

RATES = {"1gbit": 1e9, "200mbit": 2e8}
"""Bits per second."""

WARM_UP, STEPS = 1, 3

JOB = f"""
steps = {WARM_UP + STEPS}
loss = "torch.nn:MSELoss"
schedule = "1f1b"
num_microbatches = 32
max_in_flight = 6
[model]
layers = "rpcmp.tools.bench.models:wide"
num_stages = 2
kwargs = {{ num_stages = 2, width = 65536 }}
[data]
batch_size = 1024
[data.train]
callable = "rpcmp.tools.bench.models:vectors"
kwargs = {{ num_samples = 4096, features = 1 }}
"""


def sent(host: Host) -> int:
    """Return the bytes that a host has sent."""
    return int(host.run("cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


def measure(config: Path, driver: Host, hosts: list[Host], certs: Path) -> dict[str, float]:
    """Return the bits per second that each of the stages' hosts sends."""
    with contextlib.ExitStack() as started:
        addresses = [
            started.enter_context(
                serving(index, f"{host.address}:50051", certs, host.inside)
            ).address
            for index, host in enumerate(hosts)
        ]
        where = ("--connect", ",".join(addresses))
        with driving(config, certs, *where, on=driver) as run:
            marks = []
            for step in (WARM_UP, WARM_UP + STEPS):
                run.wait_for_line(f'"step": {step},')
                marks.append((time.perf_counter(), *map(sent, hosts)))
            if (result := run.wait()).code:
                raise RuntimeError(result.err)
    (began, *before), (ended, *after) = marks
    return {
        host.name: 8 * (last - first) / (ended - began)
        for host, first, last in zip(hosts, before, after, strict=True)
    }


def main() -> None:
    """Measure in a few rounds, and print medians."""
    rate, rounds = (sys.argv[1:] + ["1gbit", "5"][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as limits:
        folder = Path(name)
        config = JobFolder(folder / "job").config(JOB)
        with lan(3, folder) as (driver, *hosts):
            certs = issue(folder / "certs", *(host.address for host in hosts))
            for host in hosts:
                limits.enter_context(host.limited(rate))
            found = [measure(config, driver, hosts, certs) for _ in range(int(rounds))]
            limits.close()
    for name, way in zip(found[0], ("activations", "gradients"), strict=True):
        shares = [one[name] / RATES[rate] for one in found]
        print(
            f"{way}: {statistics.median(shares):.1%} of {rate} ({min(shares):.1%} to "
            f"{max(shares):.1%}, {rounds} runs)"
        )


if __name__ == "__main__":
    main()
