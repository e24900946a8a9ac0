"""What stages do on an accelerator, with the bits of the CPU: the matrix of devices.

The accelerator is a pretended one, `pretend:0` to `pretend:3`: see tests/support/pretend.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.pretend import on, pretending, proved
from tests.support.processes import (
    JobFolder,
    Result,
    connect,
    poll_for,
    rpcmp,
    running,
    running_server,
)
from tests.support.scraping import of, scrape, url_of


@pytest.fixture(scope="module", autouse=True)
def _devices() -> Iterator[None]:
    with pretending():
        yield


@pytest.mark.parametrize("first", ["cpu", "pretend:0"])
def test_chain(job: JobFolder, first: str) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        {on(first, "pretend:1")}
    """)
    assert "device is pretend:1 at stage 'stage1' and cpu in the reference" in proved(config)


FOUR = f"""
[model]
layers = "zoo:mlp"
balance = [1, 1, 1, 1]
{on("auto", "auto", "pretend:0", "auto")}
"""


def devices_of(result: Result) -> list[str]:
    """Return the device of each worker of a run, in the config's order."""
    assert result.code == 0, result.err
    return [place["device"] for place in result.event("generation")["workers"].values()]


def warnings_of(result: Result) -> list[str]:
    return [event["text"] for event in result.events if event["event"] == "warning"]


def test_auto_gives_the_stages_of_a_host_distinct_devices(job: JobFolder) -> None:
    config = job.config(FOUR)
    expected = ["pretend:1", "pretend:2", "pretend:0", "pretend:3"]
    run = rpcmp("drive", config, "--json")
    assert devices_of(run) == expected
    assert "share" not in str(warnings_of(run))
    checked = json.loads(rpcmp("doctor", config, "--json").out)["findings"]
    found = {one["where"]: one["text"] for one in checked if one["check"] == "device"}
    assert found["stage0"].startswith("auto: pretend:1 (Pretend P1), 1 of ")
    assert found["stage2"].startswith("pretend:0 (Pretend P1), 1 of ")
    explained = json.loads(rpcmp("explain", config, "--no-measure", "--json").out)
    assert [stage["device"] for stage in explained["stages"]] == expected


def test_more_stages_than_devices_share_them_and_say_so(job: JobFolder) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        {on("auto")}
        replicas = 3
        {on("auto")}
        replicas = 2
    """)
    result = rpcmp("drive", config, "--json")
    assert devices_of(result) == [f"pretend:{index}" for index in (0, 1, 2, 3, 0)]
    text = "stage0.0, stage1.1 share pretend:0 of .*, which has no device for each `device = "
    assert any(re.match(text, each) for each in warnings_of(result))
    checked = json.loads(rpcmp("doctor", config, "--json").out)["findings"]
    assert any(re.match(text, one["text"]) for one in checked if one["status"] == "warning")


def test_a_server_may_fix_what_auto_is(job: JobFolder) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        {on("auto", "auto")}
    """)
    with (
        running_server("--stage", "0", "--listen", "127.0.0.1:0") as first,
        running_server(
            "--stage", "1", "--listen", "127.0.0.1:0", "--device", "pretend:0"
        ) as second,
    ):
        addresses = connect([first, second])
        result = rpcmp("drive", config, "--json", "--connect", addresses)
        assert devices_of(result) == ["pretend:1", "pretend:0"]
        checked = json.loads(rpcmp("doctor", config, "--json", "--connect", addresses).out)
    found = {one["where"]: one["text"] for one in checked["findings"] if one["check"] == "device"}
    assert found["stage0"].startswith("auto: pretend:1 (")
    assert found["stage1"].startswith("pretend:0 (")


def test_layers_are_measured_on_the_device_of_the_server(job: JobFolder) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        balance = "auto"
        {on("auto", "auto")}
    """)

    def limits(*fixed: str) -> list[int]:
        """Return what each of two servers has for its stage, which share this machine."""
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(
                    running_server("--stage", str(i), "--listen", "127.0.0.1:0", "--device", device)
                )
                for i, device in enumerate(fixed)
            ]
            result = rpcmp("drive", config, "--json", "--connect", connect(servers))
        assert devices_of(result) == [*fixed]
        return [stage["limit_bytes"] for stage in result.event("plan")["stages"].values()]

    one, other = limits("pretend:2", "pretend:1")
    assert 2**29 < one == other <= 2**30  # a device has 1 GiB
    one, other = limits("pretend:2", "pretend:2")
    assert 2**28 < one == other <= 2**29
    device, host = limits("pretend:2", "cpu")
    assert 2**29 < device <= 2**30 < host


def allocated(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric, without those of workers that have not reported yet."""
    found = of(scrape(url), name, "stage", "device")
    return {labels: memory for labels, memory in found.items() if memory}


def test_metrics_of_run_and_server_have_the_memory_of_the_device(job: JobFolder) -> None:
    config = job.config(f"""
        steps = 1000000
        [model]
        layers = "zoo:mlp"
        {on("pretend:3", "cpu")}
    """)
    anywhere = ("--metrics", "127.0.0.1:0")
    stages = [("--stage", str(index), "--listen", "127.0.0.1:0") for index in range(2)]
    with (
        running_server(*stages[0], *anywhere) as first,
        running_server(*stages[1]) as second,
        running("drive", config, "--connect", connect([first, second]), *anywhere) as run,
    ):
        for each, name in (
            (run, "rpcmp_device_memory_bytes"),
            (first.run, "rpcmp_server_worker_device_memory_bytes"),
        ):
            found = poll_for(partial(allocated, url_of(each), name), "memory of a device")
            assert [*found] == [("stage0", "pretend:3")]
            assert 2**10 < found["stage0", "pretend:3"] < 2**20


def test_a_device_that_does_not_exist_is_an_error_that_names_those_that_do(job: JobFolder) -> None:
    config = job.config(FOUR.replace("pretend:0", "pretend:4"))
    exist = "cpu, pretend:0, pretend:1, pretend:2, pretend:3"
    result = rpcmp("drive", config, "--json")
    assert result.code == 2
    assert "step" not in {event["event"] for event in result.events}
    assert (
        f"stage 'stage2' failed in build: device = 'pretend:4' is not available here, but {exist}:"
        in (result.err)
    )
    assert f"there are: {exist}" in rpcmp("doctor", config).out.replace("\n", " ")
