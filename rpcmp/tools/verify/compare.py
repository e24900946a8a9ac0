"""The proof behind `rpcmp verify`: a pipelined run and one process, compared bit for bit."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rpcmp.config.schema import Config
from rpcmp.errors import MismatchError, WorkerDiedError, from_wire
from rpcmp.job.autobalance import balanced, shares_of_before
from rpcmp.job.drive import drive
from rpcmp.observability.events.definitions import LogEvent, StepEvent
from rpcmp.observability.events.event import Event
from rpcmp.pipelining import devices, parameter_names
from rpcmp.process import interpreter
from rpcmp.process.child import Child
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.logging.records import pass_on
from rpcmp.rpc import tensors
from rpcmp.rpc.tensors import load_tensors

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ComparedRun:
    """What one way of training gave.

    Attributes:
        losses: of each step.
        state: the final parameters and buffers by name.
        hosts: where it ran, by stage; the reference's under "reference".
        skipped: steps whose gradients were not finite, where the loss was scaled.
    """

    losses: list[float]
    state: State
    hosts: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: int = 0


@dataclass(frozen=True)
class Verified:
    """What was found identical.

    Attributes:
        caveats: settings under which identical bits are not promised.
        difference: how far the runs are apart; None: nowhere.
        skipped: steps in which nothing was updated.
    """

    steps: int
    num_tensors: int
    num_elements: int
    parameters_sha256: str
    caveats: list[str]
    difference: Difference | None = None
    skipped: int = 0


@dataclass(frozen=True)
class Difference:
    """How far a run whose tensors travel with fewer bits is from one process.

    Attributes:
        loss: the largest difference of a step's losses, relative to the reference's.
        parameters: the norm of the difference of all final parameters and buffers, relative to the
            norm of the reference's.
    """

    loss: float
    parameters: float


def verify(config: Config, connect: Sequence[str] | None = None) -> Verified:
    """Train `config.steps` steps across stage servers and in one process, and compare.

    Args:
        config: the job, with `steps`.
        connect: addresses of running stage servers; see rpcmp.job.drive.

    Raises:
        MismatchError: the first difference; not with a `wire_dtype`, which is expected to differ.
        CheckpointError: the folder where measured shares may be kept cannot be read.
        RpcmpError: one of the runs failed.
    """
    config, pipelined, reference = asyncio.run(_both(config, connect))
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
    )


def first_difference(pipelined: ComparedRun, reference: ComparedRun) -> str | None:
    """Where two runs differ first, or None: losses by step, then tensors by name."""
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
        if found := _tensor_difference(pipelined.state[name], reference.state[name]):
            return f"after the last step: {name}: {found}"
    return None


def distance(pipelined: ComparedRun, reference: ComparedRun) -> Difference:
    """How far two runs of equal shape are apart."""
    pairs = zip(pipelined.losses, reference.losses, strict=True)
    losses = [abs(ours - theirs) / abs(theirs) if theirs else abs(ours) for ours, theirs in pairs]
    names = sorted(reference.state)
    theirs = torch.cat([reference.state[name].double().flatten() for name in names])
    ours = torch.cat([pipelined.state[name].double().flatten() for name in names])
    size = float(theirs.norm())
    apart = float((ours - theirs).norm())
    return Difference(max(losses, default=0.0), apart / size if size else apart)


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype}{list(ours.shape)} pipelined, {theirs.dtype}{list(theirs.shape)}"
    different = (_bits(ours) != _bits(theirs)).any(dim=-1)
    if not different.any():
        return None
    first = int(different.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), ours.shape)]
    mine, other = (tensor.reshape(-1)[first].item() for tensor in (ours, theirs))
    return (
        f"{int(different.sum())} of {different.numel()} numbers differ, the first at {index}: "
        f"{mine!r} pipelined, {other!r} in one process"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes a number: NaN equals itself, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


async def _both(
    config: Config, connect: Sequence[str] | None
) -> tuple[Config, ComparedRun, ComparedRun]:
    """The job with its balance, and the two runs of it."""
    with tempfile.TemporaryDirectory(prefix="rpcmp-verify-") as folder:
        async with Forks([WORKERS, DRIVERS]) as forks:
            given = shares_of_before(config)  # those of a run that has left checkpoints, if any
            config, _ = await balanced(given, connect, forks)  # the same stages for both
            pipelined = await _pipelined(config, connect, Path(folder) / "pipelined", forks)
            return config, pipelined, await _reference(config, Path(folder) / "reference", forks)


async def _pipelined(
    config: Config, connect: Sequence[str] | None, path: Path, forks: Forks
) -> ComparedRun:
    losses: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, StepEvent):
            losses.append(event.loss)
        elif isinstance(event, LogEvent):
            pass_on(event.to_json())

    # A proof leaves nothing behind, whatever happens to it.
    kept_nothing = config.without_recovery()
    summary = await drive(kept_nothing, note, connect, evaluate=False, save_state=path, forks=forks)
    skipped = summary.skipped_steps or 0
    state = parameter_names.under_all_names(load_tensors(path), config.tied_to)
    return ComparedRun(losses, state, summary.hosts, skipped)


async def _reference(config: Config, path: Path, forks: Forks) -> ComparedRun:
    threads = max(config.stage(index).threads for index in range(config.num_stages))
    child = await Child.spawn(
        "rpcmp.tools.verify.reference", compute_environment(threads), forks=forks
    )
    child.send(
        {
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
                    return ComparedRun(losses, load_tensors(path), {"reference": message["host"]})
    finally:
        await child.kill()
    raise WorkerDiedError(f"the reference process {interpreter.describe_exit(child.exit_code)}")
