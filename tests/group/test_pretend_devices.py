"""All that stages do, on a pretend accelerator, with the bits of one process on the CPU.

Each case is a fork with all stages of a job: see tests/support/pretend and forkedcall.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import JobError
from rpcmp.pipelining.partition import ProfileOrder
from rpcmp.rpc.tensors import parameters_sha256
from rpcmp.tools.verification import first_difference
from rpcmp.worker import profiler
from tests.support.chains import GRAPH
from tests.support.faults import Faults
from tests.support.forkedcall import in_a_fork
from tests.support.localgroup import SavedGroup, local_group, unsplit
from tests.support.localpipeline import local_pipeline
from tests.support.places import ZOO
from tests.support.pretend import on, placed
from tests.support.processes import JobFolder
from tests.support.replicated import MIXED
from tests.support.resuming import BODY, STEPS
from tests.support.tiedjobs import BODY as TIED
from tests.zoo import zoo

pytestmark = [pytest.mark.usefixtures("pretended"), pytest.mark.xdist_group("pretend")]

MLP = '[model]\nlayers = "zoo:mlp"'

REPLICAS = f"{on('auto')}\nreplicas = 2"

KERNELS = """
    loss = "{loss}"
    schedule = "zero-bubble"
    optimizer = "torch.optim:Adam"
    [model]
    layers = "zoo:{layers}"
    num_stages = 2
    {stages}
    [data]
    train = "zoo:{data}"
    batch_size = 10
"""

HALF = """
    autocast = "float16"
    loss_scaling = { initial = 35000.0, growth_interval = 2 }
    max_grad_norm = 0.5
"""

AT_STAGES = """
    [data]
    train = "zoo:regression"
    batch_size = 10
    at = "stage"
"""

CASES = {
    "from the CPU": (f"{MLP}\n{on('cpu', 'pretend:1')}", "cpu 1"),
    "from another device": (f"{MLP}\n{on('pretend:0', 'pretend:1')}", "0 1"),
    "devices that are named are left to those": (
        f"{MLP}\nbalance = [1, 1, 1, 1]\n{on('auto', 'auto', 'pretend:0', 'auto')}",
        "1 2 0 3",
    ),
    "more stages than devices": (
        f"{MLP}\n{on('auto')}\nreplicas = 3\n{on('auto')}\nreplicas = 2",
        "0 1 2 3 0",
    ),
    "tied weights, replicas, clipping and zero bubble": (
        f"{TIED}\n{REPLICAS}\n{on('auto')}\n{REPLICAS}",
        "0 1 2 3 0",
    ),
    "shared turns, recompute and a scheduler beside the CPU": (
        placed(MIXED, "auto", "auto", "cpu"),
        "0 1 2 3 0 cpu",
    ),
    "a graph that fills and drains": (
        'schedule = "gpipe"\n' + placed(GRAPH, "pretend:0", "pretend:3", "auto", "cpu"),
        "0 3 1 cpu",
    ),
    "convolutions": (
        KERNELS.format(
            loss="torch.nn:MSELoss", layers="cnn", data="regression", stages=on("auto", "auto")
        ),
        "0 1",
    ),
    "an LSTM and a transformer": (
        KERNELS.format(
            loss="zoo:token_loss", layers="sequence", data="tokens", stages=on("auto", "auto")
        ),
        "0 1",
    ),
    "autocast and loss scaling": (f"{HALF}\n{MLP}\n{on('auto', 'auto')}", "0 1"),
    "samples loaded at the stage": (f"{MLP}\n{on('auto', 'auto')}\n{AT_STAGES}", "0 1"),
}
"""Jobs, and the number of each worker's device."""


def compared(path: str) -> list[str | None]:
    """Return what differs from one process on the CPU, if anything, and the workers' devices."""
    config = loader.load_config(path)
    with local_group(config.without_recovery()) as local:
        found = local.train()
        places = [str(worker.stage.model.device) for worker in local.workers]
    return [first_difference(found, unsplit(config)), *places]


@pytest.mark.parametrize(("text", "numbers"), CASES.values(), ids=CASES)
def test_the_bits_are_those_of_the_cpu(job: JobFolder, text: str, numbers: str) -> None:
    places = [f"pretend:{number}".replace("pretend:cpu", "cpu") for number in numbers.split()]
    assert in_a_fork(compared, str(job.config(text))) == [None, *places]


def test_library_calls() -> None:
    assert in_a_fork(used, "pretend:0", "auto") == used("cpu", "cpu")


def used(*places: str) -> list[Any]:
    """Use a pipeline; return all that was computed."""
    config = Config.model_validate(
        {
            "loss": "torch.nn:MSELoss",
            "num_microbatches": 4,
            "model": {"layers": "zoo:mlp", "balance": [2, 2]},
            "stages": [{"device": device} for device in places],
            "optimizer": {"callable": "torch.optim:Adam", "kwargs": {"lr": 0.01}},
            "metrics": {"error": "zoo:error", "fit": "measures:Fit"},
        }
    ).with_folder(ZOO)
    inputs, targets = zoo.regression(10).tensors
    with local_pipeline(config) as pipeline:
        found: list[Any] = [pipeline.train_step(inputs, targets) for _ in range(2)]
        state = pipeline.state_dict()
        optimizer = pipeline.optimizer.state_dict()
        pipeline.forward_backward(inputs, targets)
        found += [pipeline.optimizer.clip_grad_norm_(0.5), pipeline.optimizer.step()]
        pipeline.load_state_dict(state)
        pipeline.optimizer.load_state_dict(optimizer)
        found += [pipeline.train_step(inputs, targets), pipeline.evaluate(inputs, targets)]
        found += [pipeline.predict(inputs).tolist(), parameters_sha256(state)]
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def trained(path: Path, places: list[str], steps: int, saved: SavedGroup | None) -> SavedGroup:
    """Train on these devices, evaluating each epoch, and save what a checkpoint has."""
    overrides = [f"stages.{index}.device={place}" for index, place in enumerate(places)]
    config = loader.load_config(path, [*overrides, f"steps={steps}"])
    config = config.model_copy(update={"checkpoint": None})  # a job's, which saves by its servers
    with local_group(config, saved) as local:
        local.train(evaluate=True)
        return local.save(path.parent / f"{'-'.join(places)} to {steps}")


def resumed(path: str) -> list[bool]:
    """Return whether a run that moves from device to device saves the bytes of one on the CPU."""
    job = Path(path)
    whole = trained(job, ["cpu", "cpu"], STEPS, None)
    first = trained(job, ["pretend:1", "cpu"], 9, None)
    second = trained(job, ["cpu", "pretend:3"], STEPS, first)
    same = [
        Path(one).read_bytes() == Path(other).read_bytes()
        for one, other in zip(whole.files, second.files, strict=True)
    ]
    return [whole.progress == second.progress, *same]


def test_what_is_saved_and_evaluated_is_the_same_on_other_devices(job: JobFolder) -> None:
    path = job.config(BODY + on("cpu", "cpu"))
    assert in_a_fork(resumed, str(path)) == [True, True, True]


def measured(device: str) -> dict[str, Any]:
    """Return the profile of a layer on a device, without the layers' times."""
    config = Config.model_validate(
        {
            "loss": "torch.nn:MSELoss",
            "model": {"layers": "zoo:mlp", "num_stages": 1},
            "stages": [{"device": device}],
        }
    ).with_folder(ZOO)
    inputs, targets = zoo.regression(10).tensors
    found = profiler.measure(ProfileOrder(config=config, differentiates=False), inputs, targets)
    return found.model_dump(include={"base_bytes", "available_bytes", "num_devices"})


def test_layers_are_measured_on_the_device_of_which_the_host_has_four() -> None:
    found = in_a_fork(measured, "pretend:2")
    assert 2**29 < found.pop("available_bytes") <= 2**30
    assert found == {"base_bytes": 0, "num_devices": 4}


# Errors


def failed(path: str) -> str:
    """Return the error of a job."""
    try:
        with local_group(loader.load_config(path).without_recovery()) as local:
            local.train()
    except JobError as error:
        return str(error)
    return ""


def test_a_device_that_does_not_exist_is_an_error_that_names_those_that_do(job: JobFolder) -> None:
    path = job.config(f"{MLP}\nbalance = [2, 2]\n{on('auto', 'pretend:4')}")
    assert in_a_fork(failed, str(path)).startswith(
        "stage 'stage1' failed in build: device = 'pretend:4' is not available here, but cpu, "
        "pretend:0, pretend:1, pretend:2, pretend:3: invalid device ordinal: pretend:4"
    )


HUNGRY = f"""
    [model]
    layers = "zoo:hungry"
    balance = [1, 2]
    {on("auto", "auto")}
"""

USED = r"; .*[0-9.]+ \w+ in use on pretend:1 by this stage: give it recompute .*max_in_flight"


def test_a_device_that_runs_out_of_memory_is_explained(job: JobFolder) -> None:
    error = in_a_fork(failed, str(job.config(HUNGRY)))
    assert "stage 'stage1' failed in forward of micro-batch 2 at step 1: OutOfMemoryError" in error
    assert re.search(USED, error)


def test_memory_that_the_optimizer_lacks_is_explained_as_well(job: JobFolder) -> None:
    faults = Faults(job).fail_at(0, 1, "full", "optimizer")
    path = faults.config(sections=on("cpu", "pretend:1", "cpu"))
    error = in_a_fork(failed, str(path))
    assert re.search(r"stage 'stage\d' failed in optimizer at step 1: OutOfMemoryError", error)
    assert re.search(USED, error)
