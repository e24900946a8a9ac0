"""Workers of one host exchange tensors through memory that both have mapped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, Running, connect, rpcmp, running

WIDTH = 2**14
"""Numbers of an activation, which are worth sharing."""

WIDE = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

def layers():
    return [
        ("first", lambda: nn.Linear({WIDTH}, 1)),
        ("wide", lambda: nn.Linear(1, {WIDTH})),
        ("last", lambda: nn.Linear({WIDTH}, 1)),
    ]

def samples():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(8, {WIDTH}), torch.randn(8, 1))
"""

JOB = """
steps = 100000
num_microbatches = 2
loss = "torch.nn:MSELoss"
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.0001 } }
[model]
layers = "wide:layers"
balance = [2, 1]
[data]
batch_size = 8
train = { callable = "wide:samples" }
"""


def endless(job: JobFolder) -> Path:
    (job.folder / "wide.py").write_text(WIDE, encoding="utf-8")
    return job.config(JOB)


def shared_with(run: Running) -> dict[str, set[str]]:
    """Return whose memory each process of a run has mapped, by their names."""
    event = run.result().event("generation")
    pids = {name: worker["pid"] for name, worker in event["workers"].items()}
    pids["driver"] = event["driver"]["pid"]
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    return {
        name: set(re.findall(r"memfd:rpcmp-tensors-(\w+)\S*-[0-9a-f]{32}", text))
        for name, text in maps.items()
    }


SHARED = {"driver": {"driver"}, "stage0": {"driver", "stage0"}, "stage1": {"stage0"}}
"""The first stage reads samples, which are wide; the second one its outputs, and narrow targets."""


def test_readers_map_the_memory_of_those_that_they_read(job: JobFolder) -> None:
    with running("drive", endless(job), "--json") as run:
        run.wait_for_line('"step": 3,')
        assert shared_with(run) == SHARED


@pytest.mark.cluster
def test_so_do_confined_workers_which_may_open_nothing_of_each_other(job: JobFolder) -> None:
    confined = ("--set", "security.confine=true")
    with running("drive", endless(job), "--json", *confined) as run:
        run.wait_for_line('"step": 3,')
        assert shared_with(run) == SHARED


@pytest.mark.cluster
def test_standing_servers_of_one_host_share_memory_as_well(job: JobFolder) -> None:
    with lend_servers(2) as servers:
        where = ("--connect", connect(servers))
        with running("drive", endless(job), "--json", *where) as run:
            run.wait_for_line('"step": 3,')
            assert shared_with(run) == SHARED


def test_shared_memory_gives_the_bits_of_one_process(job: JobFolder) -> None:
    proof = rpcmp("verify", endless(job), "--steps", "3")
    assert proof.code == 0, proof.err
