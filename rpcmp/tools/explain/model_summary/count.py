"""Counting what a stage's modules are made of.

They are built on the meta device, where tensors have shapes and no memory, so that a model larger
than this host can be counted here; what cannot be built like that is built for real. So is the
optimizer's state: one step on the meta device makes all of it.

What a job is made of, counted; travels as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rpcmp.config.types import Strict
from rpcmp.errors import RpcmpError
from rpcmp.pipelining import layers, optimizers, pytree
from rpcmp.pipelining.assignment import Assignment


class LayerFacts(Strict):
    """One layer.

    Attributes:
        name: the layer's.
        parameters: how many numbers it has to be trained by, tied and frozen ones too.
    """

    name: str
    parameters: int


class StageFacts(Strict):
    """One stage; bytes are those of its tensors.

    Attributes:
        layers: in order; for a stage with a module of its own, that one.
        parameters: of all layers, those that lie in several of them once.
        trained: of these, how many its optimizer steps.
        foreign: names of parameters that are tied to another one, whose stage steps it.
        foreign_parameters: how many numbers those are.
        parameter_bytes, buffer_bytes: of its modules.
        foreign_bytes: of the foreign ones among the parameters.
        gradient_bytes: of all that is trained, foreign ones too.
        optimizer_bytes: of the optimizer's state after a step; None: only a real step can tell.
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
        parameters: of the whole model, tied ones once.
        tied: stages that have a parameter in common, its owner first.
        batches: mini-batches of each dataset, "train" and "test"; empty where they are not to be
            had here.
        steps: optimizer steps of the whole run; None where the datasets' sizes are not known.
        unknown: why datasets are not known; empty: they are.
        available_bytes: memory of this host for all processes; None where nobody knows.
    """

    stages: list[StageFacts]
    parameters: int
    tied: list[list[str]]
    batches: dict[str, int]
    steps: int | None
    unknown: str
    available_bytes: int | None


META = torch.device("meta")


def count(assignment: Assignment) -> StageFacts:
    """What one stage is made of.

    Raises:
        FactoryError, ConfigError: a layer cannot be built.
    """
    modules = _modules(assignment)
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
        layers=[LayerFacts(name=n, parameters=_parameters(m)) for n, m in modules.items()],
        parameters=sum(value.numel() for value in named.values()),
        trained=sum(value.numel() for value in own.values()),
        foreign=list(foreign),
        foreign_parameters=sum(value.numel() for value in foreign.values()),
        parameter_bytes=_bytes(named.values()),
        buffer_bytes=_bytes(buffers),
        foreign_bytes=_bytes(foreign.values()),
        gradient_bytes=_bytes(trained.values()),
        optimizer_bytes=_optimizer_bytes(assignment, own),
    )


def _modules(assignment: Assignment) -> dict[str, nn.Module]:
    config = assignment.config.model_copy(update={"init": None})  # weights change no sizes
    what = (config, assignment.stage_index, assignment.layers)
    try:
        with META:
            return layers.build_layers(*what)
    except Exception:  # it looks at numbers, which tensors have not there
        return layers.build_layers(*what)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_bytes(assignment: Assignment, named: dict[str, nn.Parameter]) -> int | None:
    """Of the state that the optimizer has after a step; None where it needs real numbers."""
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
    except RpcmpError:  # it cannot be had at all
        raise
    except Exception:
        return None
