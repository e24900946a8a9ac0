"""Whatever runs a job's code on the driver's host is kept from its user's files."""

from __future__ import annotations

import pytest

from rpcmp.job import cut_cache
from rpcmp.process.task import TASKS
from tests.support.processes import JobFolder, rpcmp

LOOKING = """
from pathlib import Path

import torch
from setproctitle import getproctitle
from torch import nn

HERE = Path("FOLDER")
SECRETS = [
    HERE.parent / "elsewhere", HERE / "certs" / "driver" / "tls.key", HERE / "stage1" / "tls.key",
    HERE / ".env", Path("CUTS_KEY"),
]

def look():
    found = []
    for path in SECRETS:
        try:
            path.read_bytes()
            found.append(path.name)
        except PermissionError:
            pass
    for path in (HERE / "written", HERE.parent / "written"):
        try:
            path.write_text("")
            found.append("written")
        except PermissionError:
            pass
    status = Path("/proc/self/status").read_text()
    kept = "NoNewPrivs:\\t1" in status and "Seccomp:\\t2" in status
    print("LOOKED", getproctitle(), "confined" if kept else "free", *found, flush=True)

look()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def data():
    return torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 4))
"""

JOB = """
steps = 1
rebalance = "off"
[security]
confine = {confine}
[model]
module = "looking:Net"
num_stages = 2
[data]
train = "looking:data"
batch_size = 10
"""


@pytest.fixture
def looking(job: JobFolder) -> JobFolder:
    (job.folder / "looking.py").write_text(
        LOOKING.replace("CUTS_KEY", str(cut_cache.key_file())).replace("FOLDER", str(job.folder))
    )
    (job.folder.parent / "elsewhere").write_text("SECRET")
    cut_cache.own_key()
    for name in ("certs/driver/tls.key", "stage1/tls.key", ".env"):
        (job.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (job.folder / name).write_text("SECRET")
    return job


def looked(job: JobFolder, command: str, confine: bool) -> dict[str, str]:
    """Return what the job's code has found, by the title of its process."""
    config = job.config(JOB.format(confine=str(confine).lower()))
    result = rpcmp(command, config)
    assert result.code == 0, result.out + result.err
    lines = [line.partition("LOOKED ")[2] for line in (result.out + result.err).splitlines()]
    return dict(line.split(" ", 1) for line in lines if line)


@pytest.mark.parametrize(
    "commands", [["explain", "doctor"], pytest.param(["verify"], marks=pytest.mark.cluster)]
)
def test_every_task_of_a_job_is_confined(looking: JobFolder, commands: list[str]) -> None:
    found: dict[str, str] = {}
    for command in commands:
        found |= looked(looking, command, confine=True)
    tasks = {op: task.partition(":")[0] for op, task in TASKS.items()}
    its = {"cut", "train"} if "verify" in commands else {*tasks} - {"train"}
    assert found == dict.fromkeys(
        {*(tasks[op] for op in its), "rpcmp.driver", "rpcmp.worker"}, "confined"
    )


def test_a_job_that_its_author_trusts_is_not(looking: JobFolder) -> None:
    found = looked(looking, "doctor", confine=False)
    seen = "free elsewhere tls.key tls.key .env cuts.key written written"
    assert found == {"rpcmp.server.host_facts": seen}
