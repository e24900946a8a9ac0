"""Layers that move in jobs of other kinds, and a driver that is lost after they have moved."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import tiedjobs
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
from tests.support.rebalanced import moved, train

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


LANGUAGE = """
steps = 6
loss = "rpcmp.losses:masked_lm"
num_microbatches = 3
schedule = "zero-bubble"
[model]
module = "unsplit:Language"
balance = [1, 3, 1]
[data]
train = "unsplit:sentences"
batch_size = 9
"""

AT_STAGES = """
steps = 6
optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
[model]
layers = "zoo:mlp"
balance = [2, 1, 1]
[data]
train = "zoo:regression"
batch_size = 10
at = "stage"
[[stages]]
[[stages]]
recompute = true
[[stages]]
"""

Balance = list[int]


@pytest.mark.parametrize(
    ("text", "first", "others"),
    [
        (LANGUAGE, [1, 3, 1], ([3, 1, 1], [1, 1, 3])),
        (tiedjobs.BODY, [1, 2, 1], ([2, 1, 1], [1, 1, 2])),
        (AT_STAGES, [2, 1, 1], ([1, 2, 1], [1, 1, 2])),
    ],
    ids=["a module", "tied parameters", "data at stages, one recomputes"],
)
def test_layers_move_with_the_same_bits(
    job: JobFolder, text: str, first: Balance, others: tuple[Balance, Balance]
) -> None:
    config = job.config(text.replace("steps = 6", 'steps = 14\nrebalance = "auto"'))
    result = train(config, {3: others[0], 8: others[1]})
    assert moved(result) == [("moved", others[0], first), ("moved", others[1], others[0])]
    assert committed(result) == committed(drive(config))
