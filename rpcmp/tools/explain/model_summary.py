"""Count what a job is made of: layers, parameters, bytes, mini-batches; for `rpcmp explain`.

Modules are built on the meta device, whose tensors have shapes and no memory, so that a model
larger than this host can be counted. A module that cannot be built like that is built for real.
The optimizer's state is counted after one step on the meta device, which creates all of it.

`count` runs in a process of its own, since it needs torch and the user's code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.config.types import Strict
from rpcmp.driver.datasets import Datasets, total_steps
from rpcmp.driver.process import Planned, plan_job
from rpcmp.errors import RpcmpError, one_line
from rpcmp.pipelining import cost_model, devices, layers, optimizers, pytree
from rpcmp.pipelining.assignment import Assignment
from rpcmp.process.channel import Message

META = torch.device("meta")


class LayerFacts(Strict):
    """One layer and its number of parameters, tied and frozen ones included."""

    name: str
    parameters: int


class StageFacts(Strict):
    """One stage; numbers of parameters count elements.

    Attributes:
        layers: in order; the stage's own module if it has one.
        parameters: of all layers; what several layers share counts once.
        trained: parameters that this stage's optimizer steps.
        foreign: names of parameters that are tied to another stage's, which steps them.
        foreign_parameters: number of foreign parameters.
        parameter_bytes, buffer_bytes: of all modules.
        foreign_bytes: part of `parameter_bytes` that is foreign.
        gradient_bytes: of everything that is trained, foreign parameters included.
        optimizer_bytes: of the optimizer's state after a step; None if only a real step creates it.
    """

    layers: list[LayerFacts]
    parameters: int
    trained: int
    foreign: list[str]
    foreign_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    foreign_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None


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
    """

    stages: list[StageFacts]
    parameters: int
    tied: list[list[str]]
    batches: dict[str, int]
    steps: int | None
    unknown: str
    available_bytes: int | None


def count(message: Message) -> Iterator[Message]:
    """Task: plan the job as a run does, and count it."""
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    summary = summarize_model(config, message["is_here"])
    yield {"event": "counted", "summary": summary.model_dump()}


def summarize_model(config: Config, is_here: bool = True) -> ModelSummary:
    """Count what the job is made of.

    Args:
        config: the job, with its balance.
        is_here: whether all of it runs on this machine.
    """
    cost_model.limits(config)
    planned = plan_job(config)
    first_replicas = [part for part in planned.assignments if part.replica == 0]
    datasets, unknown = _datasets(config, planned, is_here)
    steps, batches = config.steps, {}
    if datasets is not None:
        steps = total_steps(config, len(datasets.train))
        both = {"train": datasets.train, "test": datasets.test}
        batches = {name: len(one) for name, one in both.items() if one is not None}
        datasets.close()
    stages = [summarize_stage(part) for part in first_replicas]
    return ModelSummary(
        stages=stages,
        parameters=sum(stage.parameters - stage.foreign_parameters for stage in stages),
        tied=[list(dict.fromkeys(p.stage for p in places)) for places in first_replicas[0].tied],
        batches=batches,
        steps=steps,
        unknown=unknown,
        available_bytes=devices.available_bytes(devices.resolve_device("cpu")),
    )


def _datasets(config: Config, planned: Planned, is_here: bool) -> tuple[Datasets | None, str]:
    """Return the driver's datasets, or the stages' if this host has them, or why it has none."""
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
        parameter_bytes=_bytes(named.values()),
        buffer_bytes=_bytes(buffers),
        foreign_bytes=_bytes(foreign.values()),
        gradient_bytes=_bytes(trained.values()),
        optimizer_bytes=_optimizer_bytes(assignment, own),
    )


def _build_modules(assignment: Assignment) -> dict[str, nn.Module]:
    # Without `init`, since weights from a file change no sizes.
    config = assignment.config.model_copy(update={"init": None})
    arguments = (config, assignment.stage_index, assignment.layers)
    try:
        with META:
            return layers.build_layers(*arguments)
    except Exception:  # a layer reads numbers, which tensors on the meta device do not have
        return layers.build_layers(*arguments)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_bytes(assignment: Assignment, named: dict[str, nn.Parameter]) -> int | None:
    if not named:
        return 0
    shapes = {n: nn.Parameter(torch.empty_like(p, device=META)) for n, p in named.items()}
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
