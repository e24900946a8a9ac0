"""Jobs on hosts with devices: a pretend accelerator, `pretend:0` to `pretend:3`.

What stages compute there is compared in tests/group/test_pretend_devices.py; here are the workers'
processes, their servers and other jobs. See tests/support/pretend.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rpcmp.config import loader
from tests.support.faults import STEP, Committed, Faults, assert_recovered, committed, drive
from tests.support.localgroup import local_group
from tests.support.pool import lend_servers
from tests.support.pretend import Pretended, on, pretending, proved
from tests.support.processes import (
    JobFolder,
    Result,
    Running,
    connect,
    poll_for,
    rpcmp,
    running,
    running_server,
)
from tests.support.resuming import BODY, after
from tests.support.scraping import of, scrape, url_of

pytestmark = [pytest.mark.usefixtures("pretended"), pytest.mark.xdist_group("pretend")]

MLP = '[model]\nlayers = "zoo:mlp"'

ANYWHERE = ("--listen", "127.0.0.1:0")


def devices_of(run: Result | Running) -> list[str]:
    """Return the device of each worker of a run, in the config's order, once it trains."""
    if isinstance(run, Running):
        run.wait_for_line('"event": "step"')
        run = run.result()
    else:
        assert run.code == 0, run.err
    return [place["device"] for place in run.event("generation")["workers"].values()]


def texts_of(result: Result, event: str) -> list[str]:
    return [each["text"] for each in result.events if each["event"] == event]


def checked(config: Path, *options: str) -> list[dict[str, Any]]:
    """Return what the doctor finds."""
    found: list[dict[str, Any]] = json.loads(rpcmp("doctor", config, "--json", *options).out)[
        "findings"
    ]
    return found


def committed_here(config: Path, *overrides: str) -> Committed:
    """Return what a job on the CPU commits, with all its stages in this process."""
    with local_group(loader.load_config(config, overrides).without_recovery()) as local:
        local.train()
        return local.committed()


# Which device


@pytest.mark.cluster
def test_auto_gives_workers_distinct_devices_as_far_as_there_are_and_says_so(
    job: JobFolder,
) -> None:
    tables = f"{on('auto', 'auto', 'pretend:0', 'auto')}\nreplicas = 2"
    config = job.config(f"{MLP}\nbalance = [1, 1, 1, 1]\n{tables}")
    expected = [f"pretend:{index}" for index in (1, 2, 0, 3, 1)]
    run = rpcmp("drive", config, "--json")
    assert devices_of(run) == expected
    text = "stage0, stage3.1 share pretend:1 of .*, which has no device for each `device = "
    assert any(re.match(text, each) for each in texts_of(run, "warning"))
    memory = run.event("summary")["memory"].values()
    assert all(0 < each["idle"] <= each["peak"] < 2**20 for each in memory), memory
    findings = checked(config)
    assert any(re.match(text, one["text"]) for one in findings if one["status"] == "warning")
    found = {one["where"]: one["text"] for one in findings if one["check"] == "device"}
    assert found["stage0"].startswith("auto: pretend:1 (Pretend P1), 1 of ")
    assert found["stage2"].startswith("pretend:0 (Pretend P1), 1 of ")
    explained = json.loads(rpcmp("explain", config, "--no-measure", "--json").out)
    assert [each["device"] for each in explained["stages"][:3]] == expected[:3]


def allocated(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric, without those of workers that have not reported yet."""
    found = of(scrape(url), name, "stage", "device")
    return {labels: memory for labels, memory in found.items() if memory}


@pytest.mark.cluster
def test_a_server_may_fix_what_auto_is_and_counts_its_memory(job: JobFolder) -> None:
    config = job.config(f"steps = 1000000\n{MLP}\n{on('auto', 'cpu')}")
    metrics = ("--metrics", "127.0.0.1:0")
    with (
        running_server("--stage", "0", *ANYWHERE, *metrics, "--device", "pretend:3") as first,
        running_server("--stage", "1", *ANYWHERE) as second,
    ):
        servers = ("--connect", connect([first, second]))
        found = {one["where"]: one for one in checked(config, *servers) if one["check"] == "device"}
        assert found["stage0"]["text"].startswith("pretend:3 (")
        with running("drive", config, "--json", *servers, *metrics) as run:
            assert devices_of(run) == ["pretend:3", "cpu"]
            for each, name in (
                (run, "rpcmp_device_memory_bytes"),
                (first.run, "rpcmp_server_worker_device_memory_bytes"),
            ):
                memory = poll_for(partial(allocated, url_of(each), name), "memory of a device")
                assert [*memory] == [("stage0", "pretend:3")]
                assert 2**10 < memory["stage0", "pretend:3"] < 2**20


@pytest.mark.cluster
def test_layers_are_measured_on_the_device_of_the_server(job: JobFolder) -> None:
    config = job.config(f'{MLP}\nbalance = "auto"\n{on("auto", "auto")}')

    def limits(*fixed: str) -> list[int]:
        """Return what each of two servers has for its stage, which share this machine."""
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(
                    running_server("--stage", str(i), *ANYWHERE, "--device", device)
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


@pytest.mark.cluster
def test_layers_measured_and_samples_loaded_at_the_stages(job: JobFolder) -> None:
    data = '[data]\ntrain = "zoo:regression"\nbatch_size = 10\nat = "stage"'
    config = job.config(f'{MLP}\nbalance = "auto"\n{on("auto", "auto")}\n{data}')
    proved(config)
    trace = job.folder / "trace.json"
    run = drive(config, "--trace", str(trace))
    measured = run.event("plan")["stages"].values()
    assert all(each["limit_bytes"] > 2**29 for each in measured)
    assert {each["cat"] for each in json.loads(trace.read_text())["traceEvents"] if "cat" in each}


@pytest.mark.cluster
def test_a_device_that_does_not_exist_is_an_error_that_names_those_that_do(job: JobFolder) -> None:
    config = job.config(f"{MLP}\n{on('auto', 'pretend:4')}")
    exist = "cpu, pretend:0, pretend:1, pretend:2, pretend:3"
    message = f"device = 'pretend:4' is not available here, but {exist}:"
    result = rpcmp("drive", config, "--json")
    assert result.code == 2
    assert "step" not in {event["event"] for event in result.events}
    assert f"stage 'stage1' failed in build: {message}" in result.err
    assert message in rpcmp("doctor", config).out.replace("\n", " ")


# Several jobs of a host


def endless(job: JobFolder, *devices: str) -> Path:
    return job.config(f"steps = 1000000\n{MLP}\n{on(*devices)}")


@pytest.mark.cluster
def test_two_runs_have_distinct_devices_and_a_third_one_shares_them(job: JobFolder) -> None:
    config = endless(job, "auto", "auto")
    with (
        lend_servers(2) as servers,
        running("drive", config, "--json", "--connect", connect(servers)) as run,
    ):
        found = devices_of(run)
        ended = rpcmp("drive", config, "--json", "--set", "steps=2")
        assert sorted([*found, *devices_of(ended)]) == [f"pretend:{index}" for index in range(4)]
        named = ("--set", "stages.0.device=pretend:0", "--set", "stages.1.device=cpu")
        shared = rpcmp("drive", config, "--json", "--set", "steps=2", *named)
    assert devices_of(shared) == ["pretend:0", "cpu"]
    assert texts_of(shared, "log") == ["another job has pretend:0 of this host as well"]


@pytest.mark.cluster
def test_two_runs_that_start_at_once_have_distinct_devices(job: JobFolder) -> None:
    config = endless(job, "auto", "auto")
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running("drive", config, "--json")) for _ in range(2)]
        found = [device for run in runs for device in devices_of(run)]
        assert sorted(found) == [f"pretend:{index}" for index in range(4)]
        third = rpcmp("drive", config, "--json", "--set", "steps=2")
    assert third.code == 0, third.err
    texts = texts_of(third, "log")
    assert [text for text in texts if "another job has pretend:" in text] == texts
    assert len(texts) == 2


@pytest.mark.cluster
def test_servers_that_see_other_devices_know_them_by_their_ids(
    job: JobFolder, pretended: Pretended
) -> None:
    """Both have a `pretend:0`."""
    config = endless(job, "auto")
    seeing = partial(pretending, pretended, PRETEND_HOST="here")
    with seeing(PRETEND_VISIBLE_DEVICES="3,1"), running("drive", config, "--json") as one:
        assert devices_of(one) == ["pretend:0"]
        with seeing(PRETEND_VISIBLE_DEVICES="0,3"):
            with running("drive", config, "--json") as other:
                assert devices_of(other) == ["pretend:0"]
            with running("drive", endless(job, "pretend:1"), "--json") as third:
                assert devices_of(third) == ["pretend:1"]
                third.wait_for_line("another job has pretend:1 of this host")
        with seeing(PRETEND_VISIBLE_DEVICES="3,0"), running("drive", config, "--json") as other:
            assert devices_of(other) == ["pretend:1"]


@pytest.mark.cluster
def test_standing_servers_choose_what_no_other_job_has(job: JobFolder) -> None:
    config = endless(job, "auto")
    with (
        running_server("--stage", "0", *ANYWHERE, "--device", "pretend:0") as one,
        running_server("--stage", "0", *ANYWHERE) as other,
        running("drive", config, "--json", "--connect", connect([one])) as run,
    ):
        assert devices_of(run) == ["pretend:0"]
        again = ("drive", config, "--json", "--connect", connect([other]))
        with running(*again) as beside:
            assert devices_of(beside) == ["pretend:1"]
        with running(*again, "--set", "stages.0.device=cpu") as beside:
            assert devices_of(beside) == ["cpu"]


# What is computed and copied


def test_what_a_step_of_four_micro_batches_copies_and_waits_for(job: JobFolder) -> None:
    """The thread that launches kernels waits for nothing but the norm of the gradients.

    The first stage sends outputs; the second one losses, of which it gets gradients, and gradients.
    """
    path, places = job.folder / "watched", ("pretend:0", "pretend:1")
    config = job.config(f"""
        steps = 4
        max_grad_norm = 0.5
        loss_scope = "micro-batch" # nothing is proven in these steps
        optimizer = "torch.optim:AdamW"
        [model]
        layers = "noted:watched"
        kwargs = {{ path = "{path}" }}
        balance = [2, 3]
        {on(*places)}
        [recovery]
        enabled = false
    """)
    run = drive(config)
    assert run.code == 0, run.err
    found = {}
    for device in places:  # what it had done at the start of each step, after samples were tried
        noted = [*map(json.loads, Path(f"{path}-{device}").read_text().splitlines()[-16::4])]
        before, last = (note["counts"] for note in noted[-2:])
        more = {what: number - before.get(what, 0) for what, number in last.items()}
        found[device] = {what: number for what, number in more.items() if number}
        computing, arriving, leaving = "0", "1", "2"
        waited = noted[-1]["waited"]
        assert waited.pop(arriving) == []  # no copy waits for what it does not need
        assert waited == {computing: [1], leaving: [0, 1]}
    own_threads = (", by rpcmp-compute", ", by rpcmp-send_")
    for counts in found.values():
        # What arrives is copied by the thread that it arrives on: one of torch RPC's, or the one
        # that asked for a slice, if the answer was there before it looked.
        for what in [each for each in counts if not any(own in each for own in own_threads)]:
            assert what.startswith("copy that comes late, by ")
            del counts[what]

    def expected(leaving: int, arriving: int, **more: int) -> dict[str, int]:
        return {
            "copy that comes late, by rpcmp-compute": leaving,
            "wait of a stream, by rpcmp-compute": leaving + arriving,
            "wait of the host for an event, by rpcmp-send_0": leaving,
            "wait of the host for a stream, by rpcmp-compute": 1,
            **more,
        }

    of_losses = {"copy that comes late, by rpcmp-send_0": 4}
    assert found["pretend:0"] == expected(leaving=4, arriving=8)
    assert found["pretend:1"] == expected(leaving=8, arriving=12) | of_losses


@pytest.mark.cluster
def test_checkpoints_evaluation_export_and_resume_on_other_devices(
    job: JobFolder, tmp_path: Path
) -> None:
    def exported(folder: Path) -> dict[str, list[Any]]:
        weights = folder / "weights.safetensors"
        result = rpcmp("export", folder / "saved", weights)
        assert result.code == 0, result.err
        return {name: value.tolist() for name, value in load_file(weights).items()}

    reference = JobFolder(tmp_path / "whole").config(BODY)
    whole = drive(reference)
    config = job.config(BODY + on("pretend:1", "cpu"))
    drive(config, "--steps", "9")
    resumed = drive(
        config, "--resume", "--set", "stages.0.device=cpu", "--set", "stages.1.device=pretend:3"
    )
    assert resumed.event("resumed")["step"] == 9
    assert after(resumed, 0) == after(whole, 9)
    assert resumed.event("eval")["loss"] == whole.event("eval")["loss"]
    assert exported(job.folder) == exported(reference.parent)


# Between devices, without the host

DIRECT = """
loss = "torch.nn:MSELoss"
num_microbatches = 4
optimizer = "torch.optim:AdamW"
[transfer]
direct = true
[model]
layers = "noted:wide"
kwargs = {{ path = "{path}", lost = "{lost}" }}
balance = [2, 2, 2, 2]
[data]
batch_size = 16
train = {{ callable = "noted:samples" }}
"""

ONE_EACH = ("pretend:0", "pretend:1", "pretend:2", "pretend:3")


def wide(
    job: JobFolder, tables: str, more: str = "", path: Path | str = "", lost: Path | str = ""
) -> Path:
    """Return a job that notes its copies in files `path`-DEVICE.

    Args:
        lost: a file that the second stage creates when it loses its device; no file: it loses none.
    """
    return job.config(f"{more}\n{DIRECT.format(path=path, lost=lost)}\n{tables}")


def late(path: Path) -> dict[str, int]:
    """Return a device's copies until its last forward: to and from the host, and without it."""
    counts = json.loads(path.read_text().splitlines()[-1])["counts"]
    kinds = {"copy that comes late": 0, "copy that comes late within the devices": 0}
    for what, number in counts.items():
        if (kind := what.partition(", by ")[0]) in kinds:
            kinds[kind] += number
    with_host, without = kinds.values()
    return {"with the host": with_host, "without": without}


@pytest.mark.cluster
def test_wide_tensors_go_from_device_to_device_with_the_bits_of_one_process(job: JobFolder) -> None:
    tables = on("pretend:0", "pretend:1", "cpu", "pretend:2") + "\nrecompute = true"
    path = job.folder / "noted"
    said = proved(wide(job, tables, path=path))
    assert "device is pretend:1 at stage 'stage1' and cpu in the reference" in said
    found = late(Path(f"{path}-pretend:1"))
    assert found["without"] > 0


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("tables", "more"),
    [
        (on(*ONE_EACH), 'schedule = "1f1b"'),
        (on("pretend:0", "pretend:0", "pretend:1", "pretend:1"), 'schedule = "zero-bubble"'),
        (on("pretend:0", "cpu", "pretend:1", "pretend:2"), 'schedule = "gpipe"'),
        (
            "".join(
                f"{on(device)}\nrecompute = true\n"
                for device in ("pretend:0", "pretend:1", "pretend:1", "pretend:2")
            ),
            "microbatches_per_message = 2",
        ),
    ],
    ids=["one each", "two each", "one on the CPU", "recomputed, in several messages"],
)
def test_the_bits_are_those_of_one_process(job: JobFolder, tables: str, more: str) -> None:
    proved(wide(job, tables, more))


@pytest.mark.cluster
def test_wide_tensors_do_not_pass_through_the_host(job: JobFolder) -> None:
    path = job.folder / "noted"
    config = wide(job, on(*ONE_EACH), "steps = 4", path)
    found = {}
    for direct in ("true", "false"):
        result = rpcmp("drive", config, "--json", "--set", f"transfer.direct={direct}")
        assert result.code == 0, result.err
        found[direct] = late(Path(f"{path}-pretend:1"))
        Path(f"{path}-pretend:1").unlink()
    assert found["false"]["without"] == 0
    assert found["true"]["without"] > 0
    assert found["true"]["with the host"] < found["false"]["with the host"]


@pytest.mark.cluster
def test_devices_that_cannot_be_opened_use_the_host_and_say_so(
    job: JobFolder, pretended: Pretended
) -> None:
    config = wide(job, on(*ONE_EACH), "steps = 2")
    with pretending(pretended, PRETEND_CLOSED="1"):
        result = rpcmp("drive", config, "--json")
    texts = [each for each in texts_of(result, "log") if "[transfer] direct: tensors of" in each]
    assert len(texts) == 3  # each of the readers, of which there is one a stage but the first
    assert all("memory of the host: RuntimeError: this device is closed" in each for each in texts)
    assert committed(result) == committed_here(config, *CPUS)


# A lost device or worker

CPUS = [f"stages.{index}.device=cpu" for index in range(4)]


def test_a_lost_device_is_a_lost_worker_and_the_next_ones_memory_is_tried_again(
    job: JobFolder,
) -> None:
    path, lost = job.folder / "noted", job.folder / "lost"
    config = wide(job, on("auto", "auto", "cpu", "cpu"), "steps = 6", path, lost)
    result = drive(config)
    assert committed(result) == committed_here(config, *CPUS)
    fault = result.event("fault")
    assert (fault["kind"], fault["stage"]) == ("DeviceLostError", "stage1")
    named = re.search(r"AcceleratorError: pretend error: (pretend:\d) is lost", fault["error"])
    assert named is not None, fault["error"]  # either: a job before may still end on one of them
    assert result.event("generation")["generation"] == 2
    assert late(Path(f"{path}-{named[1]}"))["without"] > 0  # of the worker that came after it


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """What a run without a fault commits."""
    folder = tmp_path_factory.mktemp("whole")
    return committed_here(Faults(JobFolder(folder / "job")).config())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("phase", "step"),
    [("forward", 1), ("forward", STEP), ("backward", STEP), ("optimizer", STEP), ("saving", STEP)],
)
def test_a_device_may_be_lost_at_any_time(
    job: JobFolder, whole: Committed, phase: str, step: int
) -> None:
    faults = Faults(job).fail_at(1, step, "device", phase)
    result = drive(faults.config(sections=on("auto", "auto", "cpu")))
    assert committed(result) == whole
    assert_recovered(faults, result)
    assert result.event("fault")["kind"] == "DeviceLostError"


@pytest.mark.cluster
def test_a_killed_worker_is_replaced_and_its_memory_tried_again(job: JobFolder) -> None:
    config = wide(job, on("auto", "auto", "auto", "auto"), "steps = 60")
    with running("drive", config, "--json") as run:
        run.wait_for_line('"step": 3,')
        pid = run.result().event("generation")["workers"]["stage1"]["pid"]
        os.kill(pid, signal.SIGKILL)
        result = run.wait()
    assert len([each for each in result.events if each["event"] == "generation"]) == 2
    assert committed(result) == committed_here(config, *CPUS)
