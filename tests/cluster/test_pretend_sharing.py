"""Several jobs on one host with four devices, `pretend:0` to `pretend:3`: each has its own.

See tests/support/pretend.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pretend import on, pretending
from tests.support.processes import JobFolder, Running, connect, rpcmp, running, running_server


@pytest.fixture(scope="module", autouse=True)
def _devices() -> Iterator[None]:
    with pretending():
        yield


def endless(job: JobFolder, *devices: str) -> Path:
    return job.config(f'steps = 1000000\n[model]\nlayers = "zoo:mlp"\n{on(*devices)}')


def devices_of(run: Running) -> list[str]:
    """Return the devices of a run, once it trains."""
    run.wait_for_line('"event": "step"')
    events = [json.loads(line) for line in run.lines()]
    (workers,) = [event["workers"] for event in events if event["event"] == "generation"]
    return [place["device"] for place in workers.values()]


def test_two_runs_that_start_at_once_have_distinct_devices(job: JobFolder) -> None:
    config = endless(job, "auto", "auto")
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running("drive", config, "--json")) for _ in range(2)]
        found = [device for run in runs for device in devices_of(run)]
        assert sorted(found) == [f"pretend:{index}" for index in range(4)]
        third = rpcmp("drive", config, "--json", "--set", "steps=2")
    assert third.code == 0, third.err
    texts = [event["text"] for event in third.events if event["event"] == "log"]
    assert [text for text in texts if "another job has pretend:" in text] == texts
    assert len(texts) == 2


def test_servers_that_see_other_devices_know_them_by_their_ids(job: JobFolder) -> None:
    """Both have a `pretend:0`."""
    config = endless(job, "auto")
    with (
        pretending(PRETEND_VISIBLE_DEVICES="3,1", PRETEND_HOST="here"),
        running("drive", config, "--json") as one,
    ):
        assert devices_of(one) == ["pretend:0"]
        with pretending(PRETEND_VISIBLE_DEVICES="0,3", PRETEND_HOST="here"):
            with running("drive", config, "--json") as other:
                assert devices_of(other) == ["pretend:0"]
            with running("drive", endless(job, "pretend:1"), "--json") as third:
                assert devices_of(third) == ["pretend:1"]
                third.wait_for_line("another job has pretend:1 of this host")
        with (
            pretending(PRETEND_VISIBLE_DEVICES="3,0", PRETEND_HOST="here"),
            running("drive", config, "--json") as other,
        ):
            assert devices_of(other) == ["pretend:1"]


def test_standing_servers_choose_what_no_other_job_has(job: JobFolder) -> None:
    config = endless(job, "auto")
    with (
        running_server("--stage", "0", "--listen", "127.0.0.1:0", "--device", "pretend:0") as one,
        running_server("--stage", "0", "--listen", "127.0.0.1:0") as other,
        running("drive", config, "--json", "--connect", connect([one])) as run,
    ):
        assert devices_of(run) == ["pretend:0"]
        again = ("drive", config, "--json", "--connect", connect([other]))
        with running(*again) as beside:
            assert devices_of(beside) == ["pretend:1"]
        with running(*again, "--set", "stages.0.device=cpu") as beside:
            assert devices_of(beside) == ["cpu"]
