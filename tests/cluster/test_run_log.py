"""The output of a job's processes, in the driver's log and events, and in the servers' logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpcmp.process.logging.records import FIRST
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support.chains import PADDED
from tests.support.claims import prepared
from tests.support.processes import (
    DEADLINE,
    FORKS,
    JobFolder,
    Result,
    connect,
    poll_for,
    rpcmp,
    running_servers,
)
from tests.support.sharedforks import DRIVE

ONE_STAGE = 'steps = 100000\n[model]\nlayers = "zoo:mlp"\nbalance = [4]'

ANY_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def config(job: JobFolder, says: dict[str, str], stages: int = 3, more: str = "") -> Path:
    entries = ", ".join(f'{name} = "{what}"' for name, what in says.items())
    return job.config(f"""
        steps = 3
        loss_scope = "micro-batch" # the layers count their forwards
        {more}
        [model]
        layers = "talkative:layers"
        balance = {[1] * (stages - 1) + [5 - stages]}
        [model.kwargs]
        says = {{ {entries} }}
        marker = "{job.folder / "died"}"
        [data]
        train = "talkative:dataset"
        batch_size = 10
    """)


def lines(result: Result, stage: str) -> list[dict[str, Any]]:
    """Return the log events of a stage."""
    return [each for each in result.events if each["event"] == "log" and each["stage"] == stage]


def test_an_ordinary_end_logs_only_which_jobs_a_server_has(job: JobFolder) -> None:
    """TensorPipe's warnings about closed connections are not logged either."""
    path = config(job, {}, stages=2)
    text = path.read_text().replace("talkative:dataset", "zoo:regression")
    path.write_text(text)
    with running_servers(2) as servers:
        before = FORKS.standard_error()  # includes direct writes to file descriptors
        for _ in range(2):
            result = rpcmp("drive", path, "--connect", connect(servers), "--json")
            assert (result.code, result.err) == (0, "")
        errs = [server.run.err for server in servers]
        poll_for(lambda: min(map(len, errs)) >= 4, "the lines of both jobs")
        outputs = ["".join(err) for err in errs]
        after = FORKS.standard_error()
    for index, output in enumerate(outputs):
        prefix = f"{ANY_TIME} INFO( generation 1)? stage ?{index}( step 3)?: job 'job'"
        claim = rf"{prefix} claims this server, from 127\.\d+\.\d+\.\d+:\d+\n"
        release = f"{prefix} releases this server\n"
        assert re.fullmatch((claim + release) * 2, output), output
    assert {
        owner: after[owner].removeprefix(before.get(owner, b"")) for owner in after
    } == dict.fromkeys(after, b"")


def test_output_of_a_stage_reaches_the_drivers_log_during_the_run(job: JobFolder) -> None:
    before = FORKS.standard_error().get(DRIVE, b"")
    result = rpcmp("drive", config(job, {"second": "everything", "third": "lines"}), "--json")
    assert result.code == 0, result.err
    logged = lines(result, "stage1")
    assert [(each["level"], each["logger"]) for each in logged] == [
        ("INFO", "stdout"),
        ("WARNING", "talkative"),
        ("WARNING", "py.warnings"),
        ("WARNING", "py.warnings"),
        ("INFO", "stdout"),
    ]
    texts = [each["text"] for each in logged]
    assert texts[:2] == ["printed", "logged 3"]
    assert texts[2].startswith("UserWarning: deprecated by its author (")
    assert "array is not writable" in texts[3]
    assert "characters left out" in texts[4]
    assert {(each["generation"], each["step"], each["count"]) for each in logged} == {(1, 1, 1)}
    assert [each["text"] for each in lines(result, "driver")] == ["a dataset of 50 samples"]

    flood = lines(result, "stage2")
    assert len(flood) < 10
    assert sum(each["count"] for each in flood) == 500
    assert flood[-1]["text"] == "sample 499 of 500"

    (kept,) = job.folder.glob("runs/*/log.txt")
    assert "INFO generation 1 stage1 step 1: printed\n" in kept.read_text()
    log = result.err.splitlines()
    written = FORKS.standard_error()[DRIVE].removeprefix(before)
    assert written == b"written by C\n"  # unchanged, from the file descriptor
    assert len(log) == len(logged) + len(flood) + 1
    printed = re.compile(f"{ANY_TIME} INFO generation 1 stage1 step 1: printed")
    assert sum(printed.fullmatch(line) is not None for line in log) == 1
    assert "sample 499 of 500 (... 494 more like it)" in result.err


@pytest.mark.cluster
def test_the_last_words_of_a_worker_come_before_its_fault(job: JobFolder) -> None:
    path = config(job, {"second": "last words"})
    result = rpcmp("drive", path, "--json")
    assert result.code == 0, result.err
    logged = lines(result, "stage1")
    assert logged[-1]["text"] == "dividing by 1"
    assert sum(each["count"] for each in logged) == 300
    assert {each["generation"] for each in logged} == {1}
    kinds = [event["event"] for event in result.events]
    last = max(n for n, event in enumerate(result.events) if event in logged)
    assert last < kinds.index("fault")
    fault_free = rpcmp("drive", path, "--json")  # it dies only once
    assert not lines(fault_free, "stage1")
    assert (
        result.event("summary")["parameters_sha256"]
        == (fault_free.event("summary")["parameters_sha256"])
    )


def test_a_server_logs_the_lines_of_its_workers(job: JobFolder) -> None:
    path = config(job, {"first": "everything"}, stages=2)
    with running_servers(2, "--log-json", apart=False) as servers:
        options = ("--connect", connect(servers), "--log-json", "--quiet")
        result = rpcmp("drive", path, *options)
        assert result.code == 0, result.err
        poll_for(lambda: len(servers[0].run.err) >= 7, "the lines of the worker")
        there, of_other = (
            [one for line in server.run.err if not is_of_server(one := json.loads(line))]
            for server in servers
        )
        assert of_other == []
    here = [json.loads(line) for line in result.err.splitlines()]
    parts = ("stage", "generation", "step", "level", "logger", "message", "count")
    of_stage = [[one[part] for part in parts] for one in here if one["stage"] == "stage0"]
    assert of_stage == [[one[part] for part in parts] for one in there]
    assert of_stage[0] == ["stage0", 1, 1, "INFO", "stdout", "printed", 1]


def is_of_server(entry: dict[str, Any]) -> bool:
    return bool(entry["logger"] == "rpcmp.server.stage_server")


def test_an_error_is_the_last_line_of_a_json_log(tmp_path: Path) -> None:
    result = rpcmp("drive", tmp_path / "nowhere.toml", "--log-json")
    assert result.code == 2
    error, remedy = (json.loads(line) for line in result.err.splitlines())
    assert (error["level"], remedy["level"]) == ("ERROR", "INFO")
    assert "cannot read" in error["message"]
    assert remedy["message"] == "try: rpcmp drive --help"


@pytest.mark.cluster
def test_a_loss_that_leaves_out_targets_is_refused_before_the_first_step(job: JobFolder) -> None:
    text = PADDED.replace("loss_weight =", "# loss_weight =").replace(
        '"tokenized:tagger"', '"tokenized:tagger"\nkwargs = { channels = true }'
    )
    path = job.config(text.replace('"tokenized:token_loss"', '"torch.nn:CrossEntropyLoss"'))
    shown = rpcmp("drive", path, "--set", "data.shuffle=true", "--set", "steps=4")
    assert shown.code == 2, shown.err
    assert "depends on how a mini-batch is cut" in shown.err
    assert "step 1/4" not in shown.out
    options = ["--set", 'loss_scope="micro-batch"', "--set", "data.shuffle=true"]
    meant = rpcmp("drive", path, *options, "--set", "steps=1")
    assert meant.code == 0, meant.err


def test_many_claims_do_not_fill_the_log_of_a_server(tmp_path: Path) -> None:
    with running_servers(1) as (server,), grpc.insecure_channel(server.address) as channel:
        stub = ControlStub(channel)
        for _ in range(3 * FIRST):
            request = prepared(server, "")
            stub.Prepare(request, timeout=DEADLINE)
            stub.Stop(pb.StopRequest(job_id=request.job_id, generation=1), timeout=DEADLINE)
        for event in ("claims", "releases"):
            lines = [line for line in server.run.err if f"job 'evil' {event}" in line]
            assert 1 <= len(lines) <= FIRST


def test_the_log_level_filters_lines(job: JobFolder) -> None:
    path = config(job, {"first": "everything"}, stages=2)
    result = rpcmp("drive", path, "--json", "--log-level", "warning")
    assert result.code == 0, result.err
    assert "printed" not in result.err
    assert "logged 3" in result.err
    assert "printed" in [each["text"] for each in lines(result, "stage0")]
