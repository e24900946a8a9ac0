"""All that stages do, on an accelerator: with the bits of one process on the CPU.

The accelerator is a pretended one, `pretend:0` to `pretend:3`: see tests/support/pretend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rpcmp as library
from rpcmp.config.schema import Config
from rpcmp.rpc.tensors import parameters_sha256
from tests.support.chains import GRAPH
from tests.support.faults import STEP, Committed, Faults, assert_recovered, committed, drive
from tests.support.places import ZOO
from tests.support.pretend import on, pretending, proved
from tests.support.processes import JobFolder, rpcmp
from tests.support.replicated import MIXED
from tests.support.resuming import BODY, after
from tests.support.tiedjobs import BODY as TIED
from tests.zoo import zoo


@pytest.fixture(scope="module", autouse=True)
def _devices() -> Iterator[None]:
    with pretending():
        yield


def placed(text: str, *devices: str) -> str:
    """Return a job's text with a device in each of its [[stages]] tables."""
    head, *tables = text.split("[[stages]]")
    pairs = zip(devices, tables, strict=True)
    return head + "".join(f'[[stages]]\ndevice = "{device}"{table}' for device, table in pairs)


def test_tied_weights_replicas_clipping_and_zero_bubble(job: JobFolder) -> None:
    replicated = f"{on('auto')}\nreplicas = 2\n"
    proved(job.config(f"{TIED}\n{replicated}{on('auto')}\n{replicated}"))


def test_shared_turns_recompute_and_a_scheduler_beside_the_cpu(job: JobFolder) -> None:
    proved(job.config(placed(MIXED, "auto", "auto", "cpu")))


def test_graph_that_fills_and_drains(job: JobFolder) -> None:
    config = job.config(placed(GRAPH, "pretend:0", "pretend:3", "auto", "cpu"))
    proved(config, "schedule=gpipe")


@pytest.mark.parametrize(
    ("layers", "data"),
    [("cnn", "regression"), ("sequence", "tokens")],
    ids=["convolutions", "an LSTM and a transformer"],
)
def test_kernels(job: JobFolder, layers: str, data: str) -> None:
    proved(
        job.config(f"""
        loss = "{"zoo:token_loss" if data == "tokens" else "torch.nn:MSELoss"}"
        schedule = "zero-bubble"
        optimizer = "torch.optim:Adam"
        [model]
        layers = "zoo:{layers}"
        num_stages = 2
        {on("auto", "auto")}
        [data]
        train = "zoo:{data}"
        batch_size = 10
    """)
    )


def test_autocast_and_loss_scaling(job: JobFolder) -> None:
    proved(
        job.config(f"""
        autocast = "float16"
        loss_scaling = {{ initial = 35000.0, growth_interval = 2 }}
        max_grad_norm = 0.5
        [model]
        layers = "zoo:mlp"
        {on("auto", "auto")}
    """)
    )


def test_samples_loaded_at_the_stage_and_layers_measured_there(job: JobFolder) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        balance = "auto"
        {on("auto", "auto")}
        [data]
        train = "zoo:regression"
        batch_size = 10
        at = "stage"
    """)
    proved(config)
    trace = job.folder / "trace.json"
    run = drive(config, "--trace", str(trace))
    memory = run.event("summary")["memory"].values()
    assert all(0 < each["idle"] <= each["peak"] < 2**20 for each in memory), memory
    measured = run.event("plan")["stages"].values()
    assert all(each["limit_bytes"] > 2**29 for each in measured)  # a device of 1 GiB each
    assert {each["cat"] for each in json.loads(trace.read_text())["traceEvents"] if "cat" in each}


def test_library_calls(tmp_path: Path) -> None:
    inputs, targets = zoo.regression(10).tensors

    def used(*devices: str) -> list[Any]:
        config = Config.model_validate(
            {
                "loss": "torch.nn:MSELoss",
                "num_microbatches": 4,
                "model": {"layers": "zoo:mlp", "balance": [2, 2]},
                "stages": [{"device": device} for device in devices],
                "optimizer": {"callable": "torch.optim:Adam", "kwargs": {"lr": 0.01}},
                "metrics": {"error": "zoo:error", "fit": "measures:Fit"},
            }
        ).with_folder(ZOO)
        with library.launch(config) as pipeline:
            found: list[Any] = [pipeline.train_step(inputs, targets) for _ in range(2)]
            state = pipeline.state_dict()
            optimizer = pipeline.optimizer.state_dict()
            pipeline.forward_backward(inputs, targets)
            found += [pipeline.optimizer.clip_grad_norm_(0.5), pipeline.optimizer.step()]
            pipeline.load_state_dict(state)
            pipeline.optimizer.load_state_dict(optimizer)
            found += [pipeline.train_step(inputs, targets), pipeline.evaluate(inputs, targets)]
            return [*found, pipeline.predict(inputs).tolist(), parameters_sha256(state)]

    assert used("pretend:0", "auto") == used("cpu", "cpu")


def watched(job: JobFolder, steps: int = 4) -> dict[str, list[dict[str, Any]]]:
    """Train two stages; return what each device had done at the start of each step."""
    path = job.folder / "watched"
    result = drive(
        job.config(f"""
        steps = {steps}
        max_grad_norm = 0.5
        optimizer = "torch.optim:AdamW"
        [model]
        layers = "zoo:watched"
        kwargs = {{ path = "{path}" }}
        balance = [2, 3]
        {on("pretend:0", "pretend:1")}
        [recovery]
        enabled = false
    """)
    )
    assert result.code == 0, result.err
    lines = {name: Path(f"{path}-{name}").read_text() for name in ("pretend:0", "pretend:1")}
    return {name: [*map(json.loads, text.splitlines()[::4])] for name, text in lines.items()}


def test_what_a_step_of_four_micro_batches_copies_and_waits_for(job: JobFolder) -> None:
    """The thread that launches kernels waits for nothing but the norm of the gradients.

    The first stage sends outputs; the second one losses, of which it gets gradients, and gradients.
    """
    found = {}
    for device, notes in watched(job).items():
        before, after = (note["counts"] for note in notes[-2:])
        more = {what: number - before.get(what, 0) for what, number in after.items()}
        found[device] = {what: number for what, number in more.items() if number}
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


def test_no_copy_waits_for_what_it_does_not_need(job: JobFolder) -> None:
    computing, arriving, leaving = "0", "1", "2"
    for notes in watched(job).values():
        waited = notes[-1]["waited"]
        assert waited.pop(arriving) == []
        assert waited == {computing: [1], leaving: [0, 1]}


def test_a_device_that_runs_out_of_memory_is_explained(job: JobFolder) -> None:
    result = drive(
        job.config(f"""
        [model]
        layers = "zoo:hungry"
        balance = [1, 2]
        {on("auto", "auto")}
    """)
    )
    assert result.code == 1
    error = " ".join(result.err.split())
    assert "stage 'stage1' failed in forward of micro-batch 2 at step 1: OutOfMemoryError" in error
    assert re.search(r"; [0-9.]+ \w+ in use on pretend:1 by this stage: give it recompute", error)
    assert "smaller max_in_flight" in error


def test_memory_that_the_optimizer_lacks_is_explained_as_well(job: JobFolder) -> None:
    faults = Faults(job).fail_at(1, 1, "optimizer", "full")
    result = drive(faults.config(sections=on("cpu", "pretend:0", "cpu")))
    assert result.code == 1
    error = " ".join(result.err.split())
    assert "stage 'stage1' failed in optimizer at step 1: OutOfMemoryError" in error
    assert re.search(r"; [0-9.]+ \w+ in use on pretend:0 by this stage: give it recompute", error)


def exported(folder: Path) -> dict[str, list[Any]]:
    """Export the newest checkpoint of a job as one file of weights, and return them."""
    weights = folder / "weights.safetensors"
    result = rpcmp("export", folder / "saved", weights)
    assert result.code == 0, result.err
    return {name: value.tolist() for name, value in load_file(weights).items()}


def test_checkpoints_evaluation_export_and_resume_on_other_devices(
    job: JobFolder, tmp_path: Path
) -> None:
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """What a run without a fault commits."""
    folder = tmp_path_factory.mktemp("whole")
    return committed(drive(Faults(JobFolder(folder / "job")).config()))


@pytest.mark.parametrize(
    ("phase", "step"),
    [("forward", 1), ("forward", STEP), ("backward", STEP), ("optimizer", STEP), ("saving", STEP)],
)
def test_a_lost_device_is_a_lost_worker(
    job: JobFolder, whole: Committed, phase: str, step: int
) -> None:
    faults = Faults(job).fail_at(1, step, phase, "device")
    result = drive(faults.config(sections=on("auto", "auto", "cpu")))
    assert committed(result) == whole
    assert_recovered(faults, result)
    fault = result.event("fault")
    assert fault["kind"] == "DeviceLostError"
    assert "AcceleratorError: pretend error: pretend:1 is lost" in fault["error"]


def test_recovery(job: JobFolder, tmp_path: Path) -> None:
    whole = drive(Faults(JobFolder(tmp_path / "whole")).config())
    faults = Faults(job).fail_at(1, STEP, "backward", "SIGKILL")
    result = drive(faults.config(sections=on("auto", "auto", "cpu")))
    assert committed(result) == committed(whole)
    assert_recovered(faults, result)
