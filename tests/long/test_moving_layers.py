"""A driver that is lost after layers have moved: the next one goes on with them where they are."""

from __future__ import annotations

import os
import signal

from tests.support.faults import committed, drive
from tests.support.processes import (
    JobFolder,
    connect,
    poll_for,
    rpcmp,
    running,
    running_servers,
    status,
)

JOB = """
steps = 400
schedule = "1f1b"
rebalance = "auto"
[model]
layers = "paced:layers"
balance = [3, 3]
kwargs = {{ folder = "{folder}", milliseconds = {milliseconds} }}
[data]
train = "paced:samples"
batch_size = 10
"""


def test_a_run_with_another_balance_is_taken_over_from_memory(job: JobFolder) -> None:
    slowness = job.folder / "slowness"
    slowness.mkdir()
    fast = job.config(JOB.format(folder=slowness, milliseconds=0.0), "fast.toml")
    config = job.config(JOB.format(folder=slowness, milliseconds=2.0))
    undisturbed = committed(drive(fast))
    with running_servers(2, "--no-confine") as servers:
        where = ("--connect", connect(servers))
        with running("drive", config, "--json", *where) as run:
            run.wait_for_line('"step": 50,')
            (slowness / "stage1:0").write_text("3.0")
            run.wait_for_line('"event": "rebalance"')
            os.killpg(run.pid, signal.SIGKILL)
            run.process.wait()
            before = run.wait()
        (slowness / "stage1:0").unlink()
        poll_for(
            lambda: all(each["state"] == "holding" for each in status(config, servers)),
            "the servers to notice it",
        )
        after = rpcmp("drive", config, "--json", "--resume", *where)
    change, resumed = before.event("rebalance"), after.event("resumed")
    assert change["outcome"] == "moved"
    assert resumed["from_memory"], after.err
    assert resumed["step"] >= change["step"]
    assert committed(after) == (undisturbed[0][resumed["step"] :], undisturbed[1])
