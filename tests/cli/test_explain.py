"""`rpcmp explain` as a command: its output, and that a run matches it."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from rpcmp.cli import cli
from rpcmp.errors import ConfigError
from rpcmp.job import autobalance
from rpcmp.observability.trace import chrome
from tests.support.processes import (
    JobFolder,
    Server,
    connect,
    poll_for,
    rpcmp,
    running,
    running_servers,
    status,
)
from tests.support.runs import checkpoints_in

SLEEPS_S = 0.02

SLOW_LAST = f"""
    schedule = "zero-bubble"
    steps = 100000
    optimizer = {{ callable = "torch.optim:Adam", kwargs = {{ lr = 0.01 }} }}
    [model]
    layers = "zoo:lopsided"
    kwargs = {{ milliseconds = {SLEEPS_S * 1000} }}
    balance = [1, 1, 3]
    [checkpoint]
    dir = "kept"
"""
"""The last stage takes all of the time, so that the order of actions does not depend on chance."""

JOINED = """
    steps = 2
    scheduler_interval = "step"
    optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 1e30 } }
    [scheduler]
    callable = "torch.optim.lr_scheduler:ConstantLR"
    kwargs = { factor = 1e-32, total_iters = 1000 }
    [[stages]]
    name = "left"
    module = "zoo:Encoder"
    inputs = ["input"]
    [[stages]]
    name = "right"
    module = "zoo:TwoHeads"
    inputs = ["input"]
    frozen = true
    [[stages]]
    name = "join"
    module = "zoo:Join"
    kwargs = { inputs = 2 }
    inputs = ["left", "right.left"]
    replicas = 2
"""
"""A rehearsal, which has no scheduler, diverges."""


@pytest.fixture
def three() -> Iterator[list[Server]]:
    """Three running stage servers."""
    with running_servers(3) as started:
        yield started


def test_a_run_does_what_was_explained(
    job: JobFolder, three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every explained number and name equals the following run's."""
    monkeypatch.setattr(autobalance, "MOST_REHEARSED", 0.0)  # the layers' times are enough here
    config, path = job.config(SLOW_LAST), job.folder / "run.json"
    where = ("--connect", connect(three))
    explained = rpcmp("explain", config, "--json", *where)
    assert explained.code == 0, explained.err
    report: dict[str, Any] = json.loads(explained.out)
    with running("drive", config, "--json", "--trace", path, *where) as drive:
        drive.wait_for_line('"step": 7,')
        labels = {drive.pid: "driver", **{s.pid: f"stage{i}" for i, s in enumerate(three)}}
        listening = {labels[pid]: listeners(pid) for pid in labels}
        parameters = [one["parameters"] for one in status(config, three)]
        predicted = {tuple(pair) for link in report["links"] for pair in link["dials"]}
        seen: set[tuple[str, str]] = set()

        def dialled() -> bool:
            seen.update(dials(labels, three))
            return seen >= predicted

        poll_for(dialled, f"{predicted} to be dialled")
        drive.process.send_signal(signal.SIGINT)  # the running step ends, and is saved
        result = drive.wait()
    assert result.code == 128 + signal.SIGINT, result.err
    assert seen == predicted
    assert listening == {
        "driver": [],
        **{one["stage"]: [one["address"]] for one in report["listeners"]},
    }
    assert [stage["addresses"] for stage in report["stages"]] == [[s.address] for s in three]
    assert [stage["parameters"] for stage in report["stages"]] == parameters
    assert report["steps"] == result.event("start")["steps"] == 100000
    for track in chrome.read(path).tracks:
        actions = [action[1:] for action in report["actions"][track.stage]]
        orders = [
            [span.label for span in track.spans if span.step == step and span.microbatch >= 0]
            for step in range(2, 7)
        ]
        # On a busy machine an input comes late now and then, and the stage does what is ready.
        assert actions in orders, track.stage
        assert all(sorted(order) == sorted(actions) for order in orders), track.stage
    steps = [event["step_s"] for event in result.events if event["event"] == "step"]
    for seconds in (report["prediction"]["step_s"], statistics.median(steps)):
        assert seconds >= 4 * 2 * SLEEPS_S  # nothing can be faster
    peaks = result.event("summary")["memory"]
    for stage in report["stages"]:
        assert 0.5 < stage["memory"]["total"] / peaks[stage["name"]]["peak"] < 2
    (checkpoint,) = checkpoints_in(job.folder / "kept").valid()
    folder = checkpoints_in(job.folder / "kept").path_of(checkpoint.step)
    for stage in report["stages"]:
        length = (folder / f"{stage['name']}.safetensors").stat().st_size
        assert 0 <= 3 * length - stage["memory"]["snapshots"] < 3 * 8192  # names and shapes
    again = rpcmp("explain", config, "--json", "--no-measure", *where)
    (file,) = [one for one in json.loads(again.out)["files"] if one["what"] == "checkpoints"]
    assert (file["path"], file["is_in_the_way"]) == (str(job.folder / "kept"), True)


def listeners(pid: int) -> list[str]:
    """Return the TCP addresses that a process listens at."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]


def dials(labels: dict[int, str], servers: Sequence[Server]) -> Iterator[tuple[str, str]]:
    """Yield the connections from processes to other processes' servers, by their labels."""
    ports = {int(s.address.rpartition(":")[2]): f"stage{i}" for i, s in enumerate(servers)}
    for pid, label in labels.items():
        for connection in psutil.Process(pid).net_connections(kind="tcp"):
            other = ports.get(connection.raddr.port) if connection.raddr else None
            if other is not None and other != label:
                yield label, other


def test_explain_prints_tables_of_a_graph(job: JobFolder) -> None:
    result = rpcmp("explain", job.config(JOINED))
    assert result.code == 0, result.err
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == "job: 2 steps, mini-batches of 10 samples in 4 micro-batches, 1f1b"
    assert lines[1] == "the first steps try other values of schedule, max_in_flight"
    assert lines[2] == "161 parameters in 3 stages"
    assert "1 right input here (cpu) 1: right 72 frozen" in lines
    assert "2 join left, right.left 2 replicas here (cpu) 1: join 17" in lines
    assert any(line.startswith("predicted ") for line in lines)
    assert "predicted by the layers alone: " in result.out
    assert sum(line.startswith("0 left F0 ") for line in lines) == 1
    assert "join:0 127.0.0.1, a free port you and root, on this machine" in result.out.replace(
        "  ", " "
    ) or any(line.startswith("join:0 127.0.0.1, a free port") for line in lines)
    assert any(line.startswith("driver - left driver -> left batches") for line in lines)
    assert any(line.startswith("code ") for line in lines)


def test_explain_without_measuring_needs_no_servers(job: JobFolder) -> None:
    away = ("--connect", "127.0.0.1:1,127.0.0.1:2", "--json", "--no-measure")
    model = '[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]'
    result = rpcmp("explain", job.config(model), *away)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["prediction"] is None
    assert report["actions"]["stage0"][:3] == ["0F0", "0F1", "0B0"]
    assert [one["address"] for one in report["listeners"]] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert [one["exposed"] for one in report["listeners"]] == [None, None]


def test_the_shown_balance_equals_the_one_that_a_run_measures(job: JobFolder) -> None:
    body = SLOW_LAST.replace("balance = [1, 1, 3]", 'balance = "auto"\nnum_stages = 3')
    result = rpcmp("explain", job.config(body), "--json", "--set", "data.batch_size=2")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["balance"] == report["prediction"]["balance"] == [2, 1, 2]
    assert [len(stage["layers"]) for stage in report["stages"]] == [2, 1, 2]
    assert report["num_microbatches"] == 2  # the measured step has as many, too
    for stage in report["prediction"]["stages"].values():
        assert stage["busy_s"] <= report["prediction"]["step_s"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["schedule=gpipe", "max_in_flight=2", "data.batch_size=2", "model.balance=[2, 2]"],
            "gpipe holds all 4 micro-batches",
        ),
        (["model.balance=auto", "model.num_stages=2"], "without --no-measure"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    job: JobFolder, overrides: list[str], message: str
) -> None:
    sets = [part for one in overrides for part in ("--set", one)]
    config = job.config('[model]\nlayers = "zoo:mlp"')
    result = CliRunner().invoke(cli, ["explain", str(config), "--no-measure", *sets])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not list(job.folder.glob("rpcmp-*"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.balance=[1, 1]", "adds up to 2, but the model has 4 layers"),
        ('loss="torch.nn:MSELos"', "loss = 'torch.nn:MSELos' does not import"),
        ('data.train="zoo:nowhere"', "data.train = 'zoo:nowhere' does not import"),
    ],
)
def test_a_job_that_a_run_would_refuse_gets_the_same_message(
    job: JobFolder, override: str, message: str
) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    explained, driven = (
        rpcmp(command, config, "--set", override) for command in ("explain", "drive")
    )
    assert explained.code == driven.code == 2
    assert message in explained.err
    messages = (result.err.partition("\ntry: ")[0] for result in (explained, driven))
    assert len(set(messages)) == 1  # the hints differ: each command is the remedy for the other
    assert explained.out == ""
