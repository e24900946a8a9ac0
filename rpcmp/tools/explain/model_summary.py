"""Count the parameters and bytes of a job, and estimate the memory of each worker.

Modules are built on the meta device, whose tensors have shapes and no memory, so that a model
larger than this host can be counted. A module that cannot be built like that is built for real.
The optimizer's state is counted after one step on the meta device, which creates all of it.

`count` runs in a process of its own, since it needs the user's code. It alone imports torch: the
process of the command need not wait for that.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from rpcmp.checkpoint.slots import RETAINED
from rpcmp.config.schema import Config
from rpcmp.config.types import Strict
from rpcmp.errors import RpcmpError, one_line
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.partition import StageHost
from rpcmp.process.channel import Message

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rpcmp.driver.datasets import Datasets
    from rpcmp.driver.process import PlannedJob
    from rpcmp.pipelining.assignment import Assignment

SNAPSHOTS = RETAINED + 1
"""Copies of a stage that its supervisor holds: the whole ones, and one being written."""


@dataclass(frozen=True)
class LayerFacts:
    """One layer and its number of parameters, tied and frozen ones included."""

    name: str
    parameters: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker; None if unknown.

    Attributes:
        parameters, buffers, gradients: of its layers; gradients of tied parameters included.
        optimizer: its state; None if only a real step creates it and nothing was measured.
        process: of a worker without layers: torch, Python.
        activations: of all micro-batches that it may hold at once, their inputs included.
        snapshots: copies of parameters, buffers and optimizer state that its supervisor holds in
            case it is lost; in the host's memory, whatever the stage's device.
        limit: how much it may use.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    process: int | None = None
    activations: int | None = None
    snapshots: int | None = None
    limit: int | None = None

    @property
    def total(self) -> int:
        """Sum of the known parts, without the supervisor's snapshots."""
        measured = (self.process or 0) + (self.activations or 0)
        return measured + self.parameters + self.buffers + self.gradients + (self.optimizer or 0)

    @property
    def is_whole(self) -> bool:
        return None not in (self.process, self.optimizer, self.activations)

    @property
    def is_too_much(self) -> bool:
        return self.limit is not None and self.total > self.limit


class StageFacts(Strict):
    """One stage; numbers of parameters count elements.

    Attributes:
        layers: in order; the stage's own module if it has one.
        parameters: of all layers; a parameter that several layers share counts once.
        trained: parameters that this stage's optimizer steps.
        foreign: names of parameters that are tied to another stage's, which steps them.
        foreign_parameters, foreign_bytes: number of foreign parameters, and their memory.
        memory: the parts that are known without a measurement.
    """

    layers: list[LayerFacts]
    parameters: int
    trained: int
    foreign: list[str]
    foreign_parameters: int
    foreign_bytes: int
    memory: MemoryEstimate


class ModelSummary(Strict):
    """A job.

    Attributes:
        stages: in the config's order.
        parameters: of the whole model; tied ones count once.
        tied: groups of stages that share a parameter, its owner first.
        batches: number of mini-batches of each dataset, "train" and "test"; empty if they cannot
            be loaded here.
        steps: optimizer steps of the whole run; None if the datasets' sizes are unknown.
        unknown: why the datasets are unknown; empty if they are known.
        available_bytes: memory of this host for all processes; None if unknown.
        devices: of each worker, in the config's order.
    """

    stages: list[StageFacts]
    parameters: int
    tied: list[list[str]]
    batches: dict[str, int]
    steps: int | None
    unknown: str
    available_bytes: int | None
    devices: list[str] = Field(default_factory=list)


def count(message: Message) -> Iterator[Message]:
    """Task: plan the job as a run does, and count it."""
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    summary = summarize_model(config, message["is_here"])
    yield {"event": "counted", "summary": summary.model_dump_json()}


def summarize_model(config: Config, is_here: bool = True) -> ModelSummary:
    """Count a job with a known balance.

    Args:
        is_here: whether all of it runs on this machine.
    """
    from rpcmp.driver.datasets import total_steps
    from rpcmp.driver.process import plan_job
    from rpcmp.pipelining import devices

    cost_model.limits(config)
    planned = plan_job(config)
    first_replicas = [part for part in planned.assignments if part.replica == 0]
    datasets, unknown = _datasets(config, planned, is_here)
    steps, batches = config.steps, {}
    if datasets is not None:
        steps = total_steps(config, len(datasets.train))
        both = {"train": datasets.train, "test": datasets.test}
        batches = {name: len(one) for name, one in both.items() if isinstance(one, Sized)}
        datasets.close()
    stages = [summarize_stage(part) for part in first_replicas]
    wanted = [config.stage(worker.stage_index).device for worker in config.workers]
    settled = [devices.settle(wanted, own) for own in range(len(wanted))] if is_here else wanted
    return ModelSummary(
        stages=stages,
        parameters=sum(stage.parameters - stage.foreign_parameters for stage in stages),
        tied=[list(dict.fromkeys(p.stage for p in places)) for places in first_replicas[0].tied],
        batches=batches,
        steps=steps,
        unknown=unknown,
        available_bytes=devices.available_bytes(devices.resolve_device("cpu")),
        devices=settled,
    )


def _datasets(config: Config, planned: PlannedJob, is_here: bool) -> tuple[Datasets | None, str]:
    """Return the driver's datasets, or the stages' if this host has them, or why it has none."""
    from rpcmp.driver.datasets import Datasets

    if not planned.loads_at_stages:
        return planned.datasets, ""
    try:
        return Datasets.load(config), ""
    except RpcmpError as error:
        if is_here:
            raise
        return None, f"the datasets are the stages': {one_line(error)}"


def summarize_stage(assignment: Assignment) -> StageFacts:
    modules = _build_modules(assignment)
    config = assignment.config
    named: dict[str, nn.Parameter] = {}
    for layer, module in modules.items():
        if assignment.stage.frozen:
            module.requires_grad_(False)
        prefix = config.prefix_of(layer)
        named |= {prefix + name: value for name, value in module.named_parameters()}
    trained = {name: value for name, value in named.items() if value.requires_grad}
    own = {name: value for name, value in trained.items() if name not in config.tied_to}
    foreign = {name: value for name, value in named.items() if name in config.tied_to}
    buffers = [buffer for module in modules.values() for buffer in module.buffers()]
    return StageFacts(
        layers=[LayerFacts(name=n, parameters=_size(m.parameters())) for n, m in modules.items()],
        parameters=_size(named.values()),
        trained=_size(own.values()),
        foreign=list(foreign),
        foreign_parameters=_size(foreign.values()),
        foreign_bytes=_bytes(foreign.values()),
        memory=MemoryEstimate(
            parameters=_bytes(named.values()),
            buffers=_bytes(buffers),
            gradients=_bytes(trained.values()),
            optimizer=_optimizer_bytes(assignment, own),
        ),
    )


def _build_modules(assignment: Assignment) -> dict[str, nn.Module]:
    import torch

    from rpcmp.pipelining import layers

    # Without `init`, since weights from a file change no sizes.
    config = assignment.config.model_copy(update={"init": None})
    arguments = (config, assignment.stage_index, assignment.layers)
    try:
        with torch.device("meta"):
            return layers.build_layers(*arguments)
    except Exception:  # a layer reads numbers, which tensors on the meta device do not have
        return layers.build_layers(*arguments)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_bytes(assignment: Assignment, named: dict[str, nn.Parameter]) -> int | None:
    import torch
    from torch import nn

    from rpcmp.pipelining import optimizers, pytree

    if not named:
        return 0
    shapes = {n: nn.Parameter(torch.empty_like(p, device="meta")) for n, p in named.items()}
    for shape in shapes.values():
        shape.grad = torch.empty_like(shape)
    source = assignment.config.optimizer_of(assignment.stage_index)
    try:
        optimizer = optimizers.create(source, shapes)
        optimizer.step()
        return _bytes(pytree.tensors(optimizer.state_dict()))
    except RpcmpError:  # the optimizer cannot be built at all
        raise
    except Exception:  # its step reads numbers
        return None


def estimate_memory(
    config: Config, facts: StageFacts, host: StageHost | None, part: slice, limit: int | None
) -> MemoryEstimate:
    """Estimate the memory of a stage's worker.

    Args:
        host: measurements of its host.
        part: the stage's layers among all that were measured.
        limit: how much it may use, if there are no measurements.
    """
    memory = facts.memory
    optimizer = memory.optimizer
    process = activations = snapshots = None
    if host is not None:
        process, limit = host.profile.base_bytes, host.limit_bytes
        measured = host.profile.layers[part]
        kept = sum(layer.activation_bytes for layer in measured)
        times = 1 if host.recompute else host.held
        activations = host.held * measured[0].input_bytes + times * kept
        if optimizer is None:
            known = memory.parameters + memory.buffers + memory.gradients
            optimizer = max(0, sum(layer.state_bytes for layer in measured) - known)
    if config.takes_snapshots and optimizer is not None:
        own = memory.parameters - facts.foreign_bytes + memory.buffers
        snapshots = SNAPSHOTS * (own + optimizer)
    return replace(
        memory,
        optimizer=optimizer,
        process=process,
        activations=activations,
        snapshots=snapshots,
        limit=limit,
    )


@dataclass(frozen=True)
class ExplainedStage:
    """One stage as it will run.

    Attributes:
        replicas, shares: their number, and their shares of the micro-batches; empty if these are
            equal, or measured when the run starts.
        autocast: dtype that it computes in; None: the layers' own.
        addresses: HOST:PORT of its servers; empty if they are started on this machine.
        layers, parameters, trained, tied: see StageFacts; `tied` has its foreign parameters.
        in_flight: micro-batches whose activations a replica may hold at once.
        memory: of each replica.
    """

    index: int
    name: str
    inputs: list[str]
    replicas: int
    shares: list[int]
    device: str
    threads: int
    frozen: bool
    recompute: bool
    compiles: bool
    autocast: str | None
    addresses: list[str]
    layers: list[LayerFacts]
    parameters: int
    trained: int
    tied: list[str]
    in_flight: int
    memory: MemoryEstimate


def explain_stages(
    config: Config,
    summary: ModelSummary,
    hosts: Sequence[StageHost] | None,
    addresses: Sequence[str] = (),
) -> list[ExplainedStage]:
    """Return all stages; `hosts` has measurements, `addresses` the running servers, if any."""
    held, graph = cost_model.held(config), config.graph()
    ends = [0, *accumulate(len(facts.layers) for facts in summary.stages)]
    pairs = list(zip(config.workers, addresses, strict=False))
    of_stage: defaultdict[int, dict[str, None]] = defaultdict(dict)  # replicas may have others
    for worker, device in zip(config.workers, summary.devices, strict=False):
        of_stage[worker.stage_index][device] = None
    explained = []
    for index, (name, facts) in enumerate(zip(config.stage_names, summary.stages, strict=True)):
        settings = config.stage(index)
        limit = settings.memory_bytes
        if limit is None and not addresses:
            limit = _memory_share(config, index, summary)
        host = None if hosts is None else hosts[index]
        part = slice(ends[index], ends[index + 1])
        explained.append(
            ExplainedStage(
                index=index,
                name=name,
                inputs=[str(reference) for reference in graph.inputs[name]],
                replicas=settings.num_replicas,
                shares=settings.shares or [],
                device=", ".join(of_stage[index]) or settings.device,
                threads=settings.threads,
                frozen=settings.frozen,
                recompute=settings.recompute,
                compiles=config.compiles(index),
                autocast=config.autocast_of(index),
                addresses=[at for worker, at in pairs if worker.stage_index == index],
                layers=facts.layers,
                parameters=facts.parameters,
                trained=facts.trained,
                tied=facts.foreign,
                in_flight=held[name],
                memory=estimate_memory(config, facts, host, part, limit),
            )
        )
    return explained


def _memory_share(config: Config, index: int, summary: ModelSummary) -> int | None:
    """Return this machine's memory divided by its workers on the CPU."""
    devices = [config.stage(worker.stage_index).device for worker in config.workers]
    if config.stage(index).device != "cpu" or summary.available_bytes is None:
        return None
    return summary.available_bytes // devices.count("cpu")
