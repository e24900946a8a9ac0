"""Malformed inputs at every port of a job's servers: the job ends as without them.

A failure prints its seed; `FUZZ_SEED=n pytest -m system tests/system/test_fuzz.py` repeats it.
`FUZZ_INPUTS` sets the number of inputs.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.fuzz.entry_points import plain_entry_points, tls_entry_points
from tests.support.fuzz.siege import Report, Siege, besieged
from tests.support.lan import issue
from tests.support.processes import JobFolder, Server

JOB = """
steps = 60
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""

JOB_LINE = "job 'job'"
"""Text of the lines that a server logs about the job: its claim and its release."""

GROWTH = 4 * 2**20
"""Bytes by which a server may be larger after the second half than after the first."""

COUNTS = [
    pytest.param(400, id="short"),
    pytest.param(50_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("has_certs", [False, True], ids=["plain", "tls"])
def test_fuzzing_a_running_job_does_not_disturb_it(
    job: JobFolder, tmp_path: Path, count: int, has_certs: bool
) -> None:
    seed = int(os.environ.get("FUZZ_SEED", "7" if count < 10_000 else str(random.getrandbits(32))))
    print(f"FUZZ_SEED={seed}")
    certs = issue(tmp_path / "certs", "127.0.0.1", "127.0.0.1") if has_certs else None
    entry_points = plain_entry_points() if certs is None else tls_entry_points(certs)
    with besieged(2, certs) as servers:
        driver = None if certs is None else certs / "driver"
        siege = Siege(servers, job.config(JOB), entry_points, driver)
        fault_free = siege.drive()
        report = siege.run(int(os.environ.get("FUZZ_INPUTS", count)), seed)
        assert set(report.parameters) == {fault_free}
        assert_has_not_grown(report)
        assert_silent(servers)


def assert_has_not_grown(report: Report) -> None:
    """Check that the servers' resources have not grown with the inputs."""
    _, first, second = report.seen
    for one, other in zip(first, second, strict=True):
        assert other.resident - one.resident <= GROWTH, report


def assert_silent(servers: list[Server]) -> None:
    """Check that malformed inputs log no traceback, and not one line each."""
    for server in servers:
        lines = [line for line in server.run.err if not line.startswith("tasks: ")]
        assert not [line for line in lines if "Traceback" in line], "".join(lines)
        lines = [line for line in lines if JOB_LINE not in line]  # one job after the other runs
        assert len(lines) < 20, "".join(lines[:50])
