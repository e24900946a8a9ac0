"""Hosts that join and leave a run while it trains: it ends with the bits of one that stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rpcmp.job import membership
from rpcmp.job.server_calls import drain, join
from rpcmp.net.security import Security
from rpcmp.observability.events import GenerationEvent, StepEvent
from tests.support.faults import Committed, committed, drive
from tests.support.lan import cli, issue, serving
from tests.support.pool import lend_server_at, lend_servers
from tests.support.processes import JobFolder, Result, rpcmp, running, running_server
from tests.support.rebalanced import moved, train

JOB = """
steps = 70
max_grad_norm = 0.5
num_microbatches = 3
rebalance = "auto"
optimizer = {{ callable = "torch.optim:SGD", kwargs = {{ lr = 0.01, momentum = 0.9 }} }}
[model]
layers = "paced:layers"
balance = {balance}
kwargs = {{ folder = "{folder}" }}
[data]
train = "paced:samples"
batch_size = 10
[recovery]
replace_after = 60
"""
"""Steps of some 40 ms, so that a host can join or leave on the way."""


def job_of(job: JobFolder, balance: list[int]) -> Path:
    return job.config(JOB.format(balance=balance, folder=job.folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return losses and parameters of the job without any change; they depend on no balance."""
    return committed(drive(job_of(JobFolder(tmp_path_factory.mktemp("stays") / "job"), [3, 3])))


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


def numbers(result: Result) -> list[tuple[str, int, int]]:
    """Return the outcome of each change, with the number of stages after and before it.

    How many layers each has depends on how fast the hosts are measured to be.
    """
    found = moved(result)
    assert all(sum(balance) == 6 for _, *balances in found for balance in balances)
    return [(outcome, len(after), len(before)) for outcome, after, before in found]


def repeated(result: Result) -> int:
    """Return the most steps that any generation does once more."""
    last, most = 0, 0
    for event in result.events:
        if event["event"] == "generation":
            most = max(most, last - event["step"])
        elif event["event"] == "step":
            last = event["step"]
    return most


def test_a_host_joins_and_another_leaves(job: JobFolder, undisturbed: Committed) -> None:
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        calls = Calls({8: joins(new, first), 35: leaves(second)})
        result = train(job_of(job, [3, 3]), {}, connect=[first, second], after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage0", "stage2"]]
    assert numbers(result)[0] == ("moved", 3, 2)
    assert repeated(result) <= 1


def kill(pid: int) -> None:
    psutil.Process(pid).kill()


@pytest.mark.parametrize("lost", ["worker", "server"])
def test_the_first_stage_leaves_and_another_host_is_lost_at_once(
    job: JobFolder, undisturbed: Committed, lost: str
) -> None:
    """What only a mirror has of the host that left must be there until all have new snapshots."""
    generations: list[GenerationEvent] = []

    with contextlib.ExitStack() as stack:
        first, second, third = stack.enter_context(lend_servers(3))

        def strike(event: GenerationEvent) -> None:
            generations.append(event)
            if len(generations) == 2 and lost == "worker":
                kill(event.workers["stage1"]["pid"])
            elif len(generations) == 2:
                third.end()
                stack.enter_context(lend_server_at(third.address))

        calls = Calls({8: leaves(first.address)})
        servers = addresses([first, second, third])
        config = job_of(job, [2, 2, 2])
        result = train(config, {}, connect=servers, after_step=calls, on_generation=strike)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage1", "stage2"]]
    assert result.event("recovered")["step"] >= generations[1].step - 1
    assert repeated(result) <= 1


def kill_newcomer(event: GenerationEvent) -> None:
    """Kill the worker of the first host that joins."""
    if "stage2" in event.workers:
        kill(event.workers["stage2"]["pid"])


def test_a_host_that_is_lost_while_it_joins_has_not_joined(
    job: JobFolder, undisturbed: Committed
) -> None:
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)

        calls = Calls({8: joins(new, first)})
        config = job_of(job, [3, 3])
        result = train(
            config, {}, connect=[first, second], after_step=calls, on_generation=kill_newcomer
        )
    assert committed(result) == undisturbed
    assert numbers(result) == [("undone", 2, 3)]
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage0", "stage1"]]


def test_a_host_that_has_not_joined_may_try_again(
    job: JobFolder, undisturbed: Committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was dismissed, which is no end of the job."""
    monkeypatch.setattr(membership, "REFUSED_SECONDS", 0.0)
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)

        calls = Calls({8: joins(new, first), 30: joins(new, first)})
        config = job_of(job, [3, 3])
        result = train(
            config, {}, connect=[first, second], after_step=calls, on_generation=kill_newcomer
        )
    assert committed(result) == undisturbed
    assert numbers(result) == [("undone", 2, 3), ("moved", 3, 2)]
    assert stages_of(result)[-1] == ["stage0", "stage3", "stage1"]


def test_a_run_that_is_complete_stays_so_if_a_host_joins_then(
    job: JobFolder, undisturbed: Committed
) -> None:
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        calls = Calls({70: joins(new, first)})
        result = train(job_of(job, [3, 3]), {}, connect=[first, second], after_step=calls)
    assert committed(result) == undisturbed
    assert not result.event("summary")["is_cut_short"]


@pytest.mark.parametrize("how", ["killed", "drained"])
def test_the_others_take_over_what_nobody_serves_any_more(
    job: JobFolder, undisturbed: Committed, how: str
) -> None:
    with lend_servers(3) as servers:
        second = servers[1]

        def lose(event: StepEvent) -> None:
            if event.step == 8 and how == "killed":
                kill(second.pid)
            elif event.step == 8:
                second.process.terminate()

        config = job_of(job, [2, 2, 2])
        options = ("recovery.replace_after=0.3",)
        result = train(config, {}, *options, connect=addresses(servers), after_step=lose)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2"]]
    assert repeated(result) <= 1


def test_a_spare_takes_the_stage_of_a_host_that_leaves(
    job: JobFolder, undisturbed: Committed
) -> None:
    """At once, whatever `replace_after` says; and that host is no longer waited for."""
    with lend_servers(3) as servers:
        first, second, spare = addresses(servers)
        config, spares = job_of(job, [3, 3]), f"recovery.spares=['{spare}']"
        calls = Calls({8: leaves(second)})
        result = train(config, {}, spares, connect=[first, second], after_step=calls)
    assert committed(result) == undisturbed
    assert result.event("replaced")["address"] == spare
    assert stages_of(result) == []


def test_one_host_after_the_other_leaves(job: JobFolder, undisturbed: Committed) -> None:
    """The second one is told to as soon as the first has ended, whose layers it may have."""
    with lend_servers(3) as servers:
        first, second, third = addresses(servers)

        async def leave_one_by_one() -> str:
            await drain(first, True, Security(), leaves=True)
            return await drain(second, True, Security(), leaves=True)

        config, calls = job_of(job, [2, 2, 2]), Calls({8: leave_one_by_one})
        result = train(config, {}, connect=[first, second, third], after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result)[-1] == ["stage2"]
    assert repeated(result) <= 1


def test_hosts_with_measured_layers_join_as_well(job: JobFolder, undisturbed: Committed) -> None:
    """The config says how many stages there are, which is true no longer."""
    config = job_of(job, [3, 3])
    config.write_text(
        config.read_text().replace("balance = [3, 3]", 'balance = "auto"\nnum_stages = 2')
    )
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        calls = Calls({8: joins(new, first), 35: leaves(second)})
        result = train(config, {}, connect=[first, second], after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage0", "stage2"]]


def test_checkpoints_of_other_stages_resume_under_the_configs_own(
    job: JobFolder, undisturbed: Committed
) -> None:
    config = job_of(job, [3, 3])
    saves = ("checkpoint.dir=saved", "checkpoint.every_steps=10")
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        calls = Calls({8: joins(new, first)})
        result = train(config, {}, *saves, "steps=50", connect=[first, second], after_step=calls)
    assert stages_of(result) == [["stage0", "stage2", "stage1"]]
    options = [word for setting in saves for word in ("--set", setting)]
    resumed = drive(config, "--resume", *options)
    assert resumed.event("resumed")["step"] == 50
    assert committed(resumed)[1] == undisturbed[1]


def test_another_driver_goes_on_with_the_stages_that_the_run_had(
    job: JobFolder, undisturbed: Committed
) -> None:
    config = job_of(job, [3, 3])
    with lend_servers(3) as servers:
        first, second, new = addresses(servers)
        where = ("--connect", f"{first},{second}")
        with running("drive", config, "--json", *where) as run:
            run.wait_for_line('"event": "step", "step": 5,')
            assert asyncio.run(join(new, second, Security(), 30.0)) == "job"
            assert asyncio.run(drain(first, True, Security(), leaves=True)) == "job"
            run.wait_for_line('"generation": 3')
            run.process.kill()
            before = run.wait()
        result = rpcmp("drive", config, "--json", "--resume", *where)
    begin = result.event("resumed")["step"]
    assert result.event("resumed")["from_memory"] is True
    assert begin >= before.event("generation")["step"]
    assert [worker["stage"] for worker in result.event("run")["workers"]] == ["stage2", "stage1"]
    assert committed(result) == (undisturbed[0][begin:], undisturbed[1])


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
                35: lambda: drain(servers[0], False, mine, leaves=True),
            }
        )
        option = f"security.certs={certs / 'driver'}"
        result = train(job_of(job, [3, 3]), {}, option, connect=servers, after_step=calls)
    assert committed(result) == undisturbed
    assert stages_of(result) == [["stage0", "stage2", "stage1"], ["stage2", "stage1"]]
    assert repeated(result) <= 1
