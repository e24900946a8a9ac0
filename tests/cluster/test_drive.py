"""The command `rpcmp drive` end to end: its output, and one hash for every cut of a model."""

from __future__ import annotations

import json
import os
import platform
import pty
import re
import subprocess
from collections import Counter

import pytest

from rpcmp.config import loader
from rpcmp.observability.trace import chrome
from tests.support.faults import committed
from tests.support.localgroup import local_group
from tests.support.places import EXAMPLES
from tests.support.processes import FORKS, JobFolder, program, rpcmp
from tests.support.samplekinds import MADE
from tests.support.sharedforks import DRIVE


@pytest.mark.cluster
def test_digits_reaches_98_percent() -> None:
    short = ("--set", "epochs=3", "--set", "scheduler.kwargs.T_max=3")
    result = rpcmp("drive", EXAMPLES / "digits.toml", "--json", *short)
    assert result.code == 0, result.err
    summary = result.event("summary")
    assert summary["metrics"]["accuracy"] >= 0.98
    assert summary["steps"] == len(result.losses)
    assert len(summary["parameters_sha256"]) == 64
    assert list(summary["memory"]) == ["stage0", "stage1"]
    assert all(0 < stage["idle"] <= stage["peak"] for stage in summary["memory"].values())
    assert result.event("eval")["accuracy"] == summary["metrics"]["accuracy"]
    step = result.event("step")
    assert step["loss"] == summary["loss"]
    assert step["samples_per_s"] > 0
    assert set(step["busy"]) == {"stage0", "stage1"}
    assert [event["event"] for event in result.events[-2:]] == ["summary", "end"]
    assert (result.events[-1]["outcome"], result.events[-1]["error"]) == ("done", "")
    first, group, start, *_ = result.events
    assert [event["event"] for event in (first, group, start)] == ["run", "generation", "start"]
    assert [(stage["name"], stage["inputs"]) for stage in first["graph"]["stages"]] == [
        ("stage0", ["input"]),
        ("stage1", ["stage0"]),
    ]
    assert {label: place["host"] for label, place in group["workers"].items()} == {
        "stage0": platform.node(),
        "stage1": platform.node(),
    }
    assert all(place["pid"] > 0 and place["address"] for place in group["workers"].values())
    assert set(step["busy_seconds"]["stage0"]) == {"F", "B", "W", "O"}
    assert sum(step["busy_seconds"]["stage0"].values()) / step["step_s"] == step["busy"]["stage0"]
    assert set(step["learning_rates"].values()) == {step["learning_rate"]}
    times = [event["time"] for event in result.events]
    assert times == sorted(times)
    assert {event["generation"] for event in result.events} == {1}


def test_output_is_plain_lines_without_a_terminal(job: JobFolder) -> None:
    config = job.config("""
        epochs = 2
        report = "zoo:report"
        [model]
        layers = "zoo:mlp"
        num_stages = 2
        [metrics]
        error = "zoo:error"
        [data]
        train = "zoo:regression"
        test = { callable = "zoo:regression", kwargs = { samples = 7 } }
        batch_size = 25
    """)
    text = config.read_text().replace("steps = 2", "")
    config.write_text(text)
    result = rpcmp("drive", config, "-v")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "job: 4 steps, stages stage0, stage1"
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    evaluations = [line for line in lines if line.startswith("evaluation")]
    assert len(evaluations) == 2
    for step, line in zip((2, 4), evaluations, strict=True):
        assert re.fullmatch(rf"evaluation after step {step}: loss [\d.]+(, \w+ [\d.]+)*", line)
        assert "time" not in line
    assert "the report says (7, 1)" in result.out
    memory, parameters, kept = lines[-3:]
    assert re.fullmatch(r"peak memory(,? stage\d [\d,]+ MiB \(idle [\d,]+\)){2}", memory)
    assert parameters.startswith("parameters sha256 ")
    assert re.match(r"done: \d+ steps, loss \d+\.\d{4} -> \d+\.\d{4}", lines[-4])
    assert re.fullmatch(rf"kept in {job.folder}/runs/job-\d{{8}}-\d{{6}}", kept)
    assert result.err == ""


@pytest.mark.cluster
def test_a_loader_process_changes_no_bit_and_logs_nothing(job: JobFolder) -> None:
    text = "steps = 4" + MADE["mappings"].replace("[data]", "[data]\nbatch_size = 7")
    text = text.replace('test = "samples:Mapped"', "")  # it would have its own loader process
    config = job.config(text)
    with local_group(loader.load_config(config)) as local:  # loads samples in this process
        local.train()
        expected = local.committed()
    before = FORKS.standard_error()
    result = rpcmp("drive", config, "--json", "--set", "data.num_workers=1")
    assert committed(result) == expected
    assert result.err == ""
    output = FORKS.standard_error()[DRIVE].removeprefix(before.get(DRIVE, b""))
    assert output == b""  # no warning of leaked semaphores


def test_a_trace_has_every_action_of_every_stage(job: JobFolder) -> None:
    config = job.config("""
        schedule = "zero-bubble"
        steps = 3
        [model]
        layers = "zoo:mlp"
        num_stages = 2
    """)
    path = job.folder / "run.json.gz"
    result = rpcmp("drive", config, "--trace", path, "--quiet")
    assert result.code == 0, result.err
    shown = [line.split()[0] for line in result.out.splitlines()]
    assert shown == ["done:", "peak", "parameters"]
    found = {
        track.stage: Counter(str(span.kind) for span in track.spans)
        for track in chrome.read(path).tracks
    }
    assert found == {  # the first stage reads only the batch, so its backwards are not split
        "stage0": {"F": 12, "B": 12, "O": 3},
        "stage1": {"F": 12, "B": 12, "W": 12, "O": 3},
    }
    shares = rpcmp("trace", path, "--json")
    assert shares.code == 0, shares.err
    assert [stage["stage"] for stage in json.loads(shares.out)["stages"]] == list(found)


def test_a_progress_bar_on_a_terminal(job: JobFolder) -> None:
    config = job.config('steps = 8\n[model]\nlayers = "zoo:mlp"\nnum_stages = 1')
    master, slave = pty.openpty()
    with program() as (command, fds):
        process = subprocess.Popen(
            [*command, "drive", config],
            stdout=slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "140", "TERM": "xterm-256color"},
            pass_fds=fds,
        )
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:  # the terminal's other end is closed
            break
    os.close(master)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "samples/s" in text
    assert "ETA" in text
    assert "8/8" in text
    assert "busy" in text
    assert "parameters sha256" in text
