"""Hosts that join and leave a run while it trains: it ends with the bits of one that stays.

What else may happen meanwhile is in tests/controlplane/test_membership.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from rpcmp.job.server_calls import drain, join
from rpcmp.net.security import Security
from rpcmp.observability.events import StepEvent
from tests.support.faults import Committed, committed, drive
from tests.support.lan import cli, issue, serving
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, Result, running_server
from tests.support.rebalanced import moved, train

JOB = """
steps = 50
max_grad_norm = 0.5
num_microbatches = 3
rebalance = "auto"
optimizer = {{ callable = "torch.optim:SGD", kwargs = {{ lr = 0.01, momentum = 0.9 }} }}
[model]
layers = "paced:layers"
balance = [3, 3]
kwargs = {{ folder = "{folder}" }}
[data]
train = "paced:samples"
batch_size = 10
[recovery]
replace_after = 60
"""
"""Steps of some 40 ms, so that a host can join or leave on the way."""


def job_of(job: JobFolder) -> Path:
    return job.config(JOB.format(folder=job.folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return losses and parameters of the job without any change; they depend on no balance."""
    return committed(drive(job_of(JobFolder(tmp_path_factory.mktemp("stays") / "job"))))


class Calls:
    """Calls that are made beside a run, after some of its steps."""

    def __init__(self, calls: dict[int, Callable[[], Coroutine[Any, Any, str]]]) -> None:
        self._left = dict(calls)
        self.made: list[asyncio.Task[str]] = []

    def __call__(self, event: StepEvent) -> None:
        if (call := self._left.pop(event.step, None)) is not None:
            self.made.append(asyncio.ensure_future(call()))


def joins(address: str, server: str) -> Callable[[], Coroutine[Any, Any, str]]:
    return lambda: join(address, server, Security(), 20.0)


def leaves(address: str) -> Callable[[], Coroutine[Any, Any, str]]:
    return lambda: drain(address, False, Security(), leaves=True)


def addresses(servers: Sequence[Any]) -> list[str]:
    return [server.address for server in servers]


def stages_of(result: Result) -> list[list[str]]:
    """Return the names of the stages, each time that they change."""
    return [
        [stage["name"] for stage in event["graph"]["stages"]]
        for event in result.events
        if event["event"] == "stages"
    ]


@pytest.mark.cluster
def test_a_host_joins_and_another_leaves(job: JobFolder, undisturbed: Committed) -> None:
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        calls = Calls({8: joins(new, first), 28: leaves(second)})
        result = train(job_of(job), {}, connect=[first, second], after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage0", "stage2"]]
    assert moved(result)[0][0] == "moved"


@pytest.mark.cluster
def test_certificates_let_a_spare_join_and_the_first_stage_leave(
    job: JobFolder, undisturbed: Committed, tmp_path: Path
) -> None:
    """Then another stage's server has the rendezvous, and a stage stands where none was issued."""
    here = "127.0.0.1"
    certs = issue(tmp_path / "certs", here, here)
    cli(certs, "issue", "--spare", "--host", here)
    mine = Security(certs / "driver")
    with contextlib.ExitStack() as started:
        servers = [
            started.enter_context(serving(stage, f"{here}:0", certs)).address for stage in range(2)
        ]
        serve = ("--spare", "--listen", f"{here}:0", "--certs", str(certs / "spare"))
        new = started.enter_context(running_server(*serve, owner="spare")).address
        calls = Calls(
            {
                8: lambda: join(new, servers[1], mine, 20.0),
                28: lambda: drain(servers[0], False, mine, leaves=True),
            }
        )
        option = f"security.certs={certs / 'driver'}"
        result = train(job_of(job), {}, option, connect=servers, after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage2", "stage1"]]
