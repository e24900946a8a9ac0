"""Compare a pipelined run with a run in one process, bit for bit: `rpcmp verify`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rpcmp.config.schema import Config
from rpcmp.errors import MismatchError, WorkerDiedError, from_wire
from rpcmp.job.autobalance import balanced, with_saved_shares
from rpcmp.job.server_calls import code_access, server_addresses
from rpcmp.job.training_run import drive
from rpcmp.observability.events import Event, LogEvent, StepEvent
from rpcmp.pipelining import devices, parameter_names
from rpcmp.process import interpreter
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.logging.records import pass_on
from rpcmp.process.task import start_task
from rpcmp.rpc import tensors
from rpcmp.rpc.tensors import load_tensors

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ComparedRun:
    """Results of one run.

    Attributes:
        state: the final parameters and buffers by name.
        hosts: facts about the hosts by stage, or of the reference's host under "reference".
        skipped: number of steps that loss scaling skipped, since gradients were not finite.
    """

    losses: list[float]
    state: State
    hosts: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: int = 0
    depends_on_parts: str = ""


@dataclass(frozen=True)
class Verified:
    """Results of a verification.

    Attributes:
        num_elements: numbers in all tensors together.
        caveats: differences between hosts under which identical bits are not promised.
        difference: how far the runs are apart; None if they are identical.
        skipped: number of steps in which nothing was updated.
        whole: how far a plain loop over whole mini-batches is away; None: it was not asked for, or
            is no measure, since the model has what `depends_on_parts` says.
    """

    steps: int
    num_tensors: int
    num_elements: int
    parameters_sha256: str
    caveats: list[str]
    difference: Difference | None = None
    skipped: int = 0
    whole: Difference | None = None
    depends_on_parts: str = ""


@dataclass(frozen=True)
class Difference:
    """Distance of a run whose tensors travel with fewer bits from the reference.

    Attributes:
        loss: the largest difference of a step's losses, relative to the reference's.
        parameters: norm of the difference of all final parameters and buffers, relative to the
            norm of the reference's.
    """

    loss: float
    parameters: float


def verify(
    config: Config, connect: Sequence[str] | None = None, whole_batch: bool = True
) -> Verified:
    """Train `config.steps` steps across stage servers and in one process, and compare.

    Args:
        whole_batch: whether to train on whole mini-batches as well, without micro-batches.

    Raises:
        MismatchError: the runs differ; says where first. A `wire_dtype` is expected to make them
            differ, and raises nothing.
    """
    config, pipelined, reference, whole = asyncio.run(run_all(config, connect, whole_batch))
    caveats = devices.host_differences(reference.hosts["reference"], pipelined.hosts)
    difference = first_difference(pipelined, reference)
    if difference is not None and config.wire_dtype is None:
        raise MismatchError("\n  ".join([difference, *(f"note: {text}" for text in caveats)]))
    return Verified(
        steps=len(reference.losses),
        num_tensors=len(reference.state),
        num_elements=sum(tensor.numel() for tensor in reference.state.values()),
        parameters_sha256=tensors.parameters_sha256(reference.state),
        caveats=caveats,
        difference=None if difference is None else distance(pipelined, reference),
        skipped=pipelined.skipped,
        whole=None if whole is None else distance(reference, whole),
        depends_on_parts=reference.depends_on_parts,
    )


def first_difference(pipelined: ComparedRun, reference: ComparedRun) -> str | None:
    """Describe the first difference of two runs: losses by step, then tensors by name."""
    if len(pipelined.losses) != len(reference.losses):
        return f"{len(pipelined.losses)} steps pipelined, {len(reference.losses)} in one process"
    for step, (ours, theirs) in enumerate(
        zip(pipelined.losses, reference.losses, strict=True), start=1
    ):
        if ours.hex() != theirs.hex():
            return f"step {step}: loss {ours!r} pipelined, {theirs!r} in one process"
    if set(pipelined.state) != set(reference.state):
        names = sorted(set(pipelined.state) ^ set(reference.state))
        return f"only one of the runs has {', '.join(names)}"
    for name in sorted(reference.state):
        if difference := _tensor_difference(pipelined.state[name], reference.state[name]):
            return f"after the last step: {name}: {difference}"
    return None


def distance(pipelined: ComparedRun, reference: ComparedRun) -> Difference:
    """Measure how far two runs with the same steps and tensors are apart."""
    pairs = zip(pipelined.losses, reference.losses, strict=True)
    losses = [abs(ours - theirs) / abs(theirs) if theirs else abs(ours) for ours, theirs in pairs]
    names = sorted(reference.state)
    theirs = torch.cat([reference.state[name].double().flatten() for name in names])
    ours = torch.cat([pipelined.state[name].double().flatten() for name in names])
    norm = float(theirs.norm())
    apart = float((ours - theirs).norm())
    return Difference(max(losses, default=0.0), apart / norm if norm else apart)


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype}{list(ours.shape)} pipelined, {theirs.dtype}{list(theirs.shape)}"
    different = (_bits(ours) != _bits(theirs)).any(dim=-1)
    if not different.any():
        return None
    first = int(different.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), ours.shape)]
    our_number, their_number = (tensor.reshape(-1)[first].item() for tensor in (ours, theirs))
    return (
        f"{int(different.sum())} of {different.numel()} numbers differ, the first at {index}: "
        f"{our_number!r} pipelined, {their_number!r} in one process"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row of bytes per number: NaN equals itself, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


async def run_all(
    config: Config, connect: Sequence[str] | None, whole_batch: bool
) -> tuple[Config, ComparedRun, ComparedRun, ComparedRun | None]:
    """Train the job across stage servers, and in one process in micro-batches and without them.

    Returns:
        It with its balance, and what has come out; None for what was not asked for, or would be
        another model: with dropout, batch normalization, or a loss that is meant for micro-batches.
    """
    with tempfile.TemporaryDirectory(prefix="rpcmp-verify-") as folder:
        async with Forks([WORKERS, DRIVERS]) as forks:
            # Shares of the run that left checkpoints, if any; and the same stages for both runs.
            config, _ = await balanced(with_saved_shares(config), connect, forks)
            pipelined = await _run_pipelined(config, connect, Path(folder) / "pipelined", forks)
            reference = await _run_reference(config, connect, Path(folder) / "reference", forks)
            whole = None
            if whole_batch and not reference.depends_on_parts and config.loss_scope is None:
                job = without_microbatches(config)
                whole = await _run_reference(job, connect, Path(folder) / "whole", forks)
            return config, pipelined, reference, whole


def without_microbatches(config: Config) -> Config:
    """Return a job that trains on whole mini-batches, each stage on one host."""
    alone: dict[str, object] = {"replicas": 1, "shares": None, "addresses": []}
    stages = [stage.model_copy(update=alone) for stage in config.stages]
    return config.model_copy(update={"num_microbatches": 1, "stages": stages})


async def _run_pipelined(
    config: Config, connect: Sequence[str] | None, path: Path, forks: Forks
) -> ComparedRun:
    losses: list[float] = []

    def handle(event: Event) -> None:
        if isinstance(event, StepEvent):
            losses.append(event.loss)
        elif isinstance(event, LogEvent):
            pass_on(event.to_json())

    # Without checkpoints: a verification leaves nothing behind, whatever happens to it.
    job = config.without_recovery()
    summary = await drive(job, handle, connect, evaluate=False, save_state=path, forks=forks)
    skipped = summary.skipped_steps or 0
    state = parameter_names.under_all_names(load_tensors(path), config.other_names)
    return ComparedRun(losses, state, summary.hosts, skipped)


async def _run_reference(
    config: Config, connect: Sequence[str] | None, folder: Path, forks: Forks
) -> ComparedRun:
    """Train in one process.

    Args:
        folder: of the final state alone; it is made, and the job's code may write to it.
    """
    await asyncio.to_thread(folder.mkdir)
    path = folder / "state"
    threads = max(config.stage(index).threads for index in range(config.num_stages))
    access = code_access(config, server_addresses(config, connect))
    access = access and access.writing(folder)
    child = await start_task("train", compute_environment(threads), forks, access)
    child.send(
        {
            "op": "train",
            "config": config.model_dump_json(),
            "folder": str(config.folder),
            "steps": config.steps,
            "save_state": str(path),
        }
    )
    losses: list[float] = []
    try:
        async for message in child.messages():
            match message["event"]:
                case "step":
                    losses.append(message["loss"])
                case "error":
                    raise from_wire(message["error"])
                case "done":
                    hosts = {"reference": message["host"]}
                    state = load_tensors(path)
                    return ComparedRun(losses, state, hosts, depends_on_parts=message["depends"])
    finally:
        await child.kill()
    raise WorkerDiedError(f"the reference process {interpreter.describe_exit(child.exit_code)}")
