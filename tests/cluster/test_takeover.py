"""A driver is lost: another one goes on from what the stage servers hold, and only one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.job.takeover import About
from tests.support.faults import Committed, Faults, committed, drive
from tests.support.halfprecision import SCALED
from tests.support.hosts import LOSING, committed_without_fault, slow_config
from tests.support.lan import issue, serving
from tests.support.places import ZOO
from tests.support.processes import (
    JobFolder,
    Result,
    Server,
    connect,
    poll_for,
    rpcmp,
    running,
    running_servers,
    status,
)
from tests.zoo import architectures

Servers = list[Server]

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """The commits of a run without a loss."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.fixture
def servers() -> Iterator[Servers]:
    with running_servers(2) as started:
        yield started


def lose_driver(config: Path, servers: Servers, *options: str, line: str = LOSING) -> Result:
    """Run a job up to a line of its output, and kill all processes of its driver."""
    where = ("--connect", connect(servers))
    with running("drive", config, "--json", *where, *options) as run:
        run.wait_for_line(line)
        os.killpg(run.pid, signal.SIGKILL)
        run.process.wait()
        result = run.wait()
    poll_for(lambda: is_held(config, servers), "the servers to notice it")
    return result


def is_held(config: Path, servers: Servers) -> bool:
    return all(stage["state"] == "holding" for stage in status(config, servers))


def assert_goes_on(before: Result, after: Result, fault_free: Committed) -> None:
    """Check that the next driver began where the servers were, and ended with the same bits."""
    resumed = after.event("resumed")
    assert resumed["from_memory"], after.err
    assert resumed["step"] >= before.event("step")["step"] - 1
    assert committed(after) == (fault_free[0][resumed["step"] :], fault_free[1])
    assert after.event("generation")["generation"] == 2


def test_another_driver_goes_on_where_the_servers_are(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """From another folder, as on another host, where there are no checkpoints."""
    before = lose_driver(slow_config(job), servers)
    config = slow_config(JobFolder(job.folder.with_name("elsewhere")))
    shown = rpcmp("status", config, "--connect", connect(servers))
    assert "job (held, " in shown.out
    after = rpcmp("drive", config, "--resume", "--json", "--connect", connect(servers))
    assert_goes_on(before, after, fault_free)
    assert {stage["state"] for stage in status(config, servers)} == {"idle"}


def test_a_stage_cannot_have_the_next_driver_go_elsewhere(
    job: JobFolder, fault_free: Committed, tmp_path: Path
) -> None:
    """Its server tells of a newer run at addresses of its own, and that the run has ended."""
    certs = issue(tmp_path / "certs", HERE, HERE)
    config = slow_config(job)
    with config.open("a") as file:
        file.write(f"\n[security]\ncerts = '{certs / 'driver'}'\n")
    with contextlib.ExitStack() as started:
        first = started.enter_context(serving(0, f"{HERE}:0", certs))
        with serving(1, f"{HERE}:0", certs) as second:
            before = lose_driver(config, [first, second])
        run = before.event("run")
        about = About(
            run="elsewhere",
            run_folder="",
            addresses=[second.address] * 2,
            numbers=[1, 1],
            layers={"stage0": ["layer0"], "stage1": ["layer1"]},
            shares={},
            config={},
            recorded_at=time.time() + 60,
        )
        told = {
            "job": run["name"],
            "job_id": "f" * 32,
            "generation": 99,
            "driver_id": "false",
            "about": about.model_dump_json(),
            "about_generation": 99,
            "states": [{"step": 1, "state": json.dumps({"step": 1, "loss": 0.5}), "number": 9}],
            "ended": [{"job_id": run["job_id"]}],
        }
        liar = (sys.executable, str(ZOO / "false_stage.py"), json.dumps(told))
        started.enter_context(serving(1, second.address, certs, under=liar))
        where = ("--connect", connect([first, second]))
        after = rpcmp("drive", config, "--resume", "--json", *where)
    assert_goes_on(before, after, fault_free)
    for what in ("about", "state", "ended"):
        text = f"{second.address} holds of a job is not used ({what}): no driver has signed it"
        assert text in after.err


@pytest.mark.cluster
def test_a_driver_that_is_killed_after_its_summary_leaves_nothing_held(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """And nothing is trained a second time."""
    config, where = slow_config(job), ("--connect", connect(servers), "--json")
    with running("drive", config, *where) as run:
        run.wait_for_line('"event": "summary"')
        os.killpg(run.pid, signal.SIGKILL)
        run.process.wait()
        before = run.wait()
    assert_idle(config, servers)
    again = rpcmp("drive", config, "--resume", *where)
    assert (again.code, again.event("resumed")["is_complete"]) == (0, True)
    assert again.event("run")["job_id"] == before.event("run")["job_id"]
    assert committed(again) == ([], fault_free[1])


def assert_idle(config: Path, servers: Servers) -> None:
    """Wait until no server is claimed, and check that none holds a job."""

    def free() -> list[str]:
        states = [stage["state"] for stage in status(config, servers)]
        return states if {*states} <= {"idle", "holding"} else []

    assert poll_for(free, "free servers") == ["idle", "idle"]


OF_ALL_KINDS = """
[early_stopping]
patience = 20
[data]
train = "zoo:regression"
test = "zoo:regression"
batch_size = 10
"""


@pytest.mark.cluster
def test_the_drivers_own_state_is_the_same(job: JobFolder, servers: Servers) -> None:
    """The loss scale, the evaluations, the counter of early stopping, the epoch's mean loss."""
    text = f"steps = 20\nevaluate_every_steps = 3\n{SCALED}"
    config = Faults(job).config(text, 2, 10.0, OF_ALL_KINDS)
    whole = drive(config)
    before = lose_driver(config, servers)
    after = rpcmp("drive", config, "--resume", "--json", "--connect", connect(servers))
    assert_goes_on(before, after, committed(whole))
    begin = after.event("resumed")["step"]
    ours, theirs = (
        [
            (e["step"], e["loss"])
            for e in result.events
            if e["event"] == "eval" and e["step"] > begin
        ]
        for result in (whole, after)
    )
    assert ours == theirs
    kept = ("loss_scale", "skipped_steps", "metrics")
    assert [whole.event("summary")[key] for key in kept] == [
        after.event("summary")[key] for key in kept
    ]


@pytest.mark.cluster
def test_a_complete_run_of_a_module_that_was_cut_is_known_again(
    job: JobFolder, servers: Servers
) -> None:
    config = job.config(architectures.job("language", 2, "1f1b"))
    where = ("--connect", connect(servers), "--json")
    before = rpcmp("drive", config, *where)
    again = rpcmp("drive", config, "--resume", *where)
    assert again.event("resumed")["is_complete"]
    assert committed(again) == ([], before.event("summary")["parameters_sha256"])
