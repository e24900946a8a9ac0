"""Consecutive layers of the job as plain PyTorch: what every peer is made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rpcmp import data, devices, factory, graph, layers, optimizers, plan
from rpcmp.config import Config
from rpcmp.errors import UnfitError


@dataclass(frozen=True)
class Part:
    """A run of layers and its optimizer; None where nothing in it is trained."""

    module: nn.Sequential
    optimizer: torch.optim.Optimizer | None

    def step(self) -> None:
        """Update the parameters and clear their gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def layer_names(config: Config, parts_a_stage: int = 1) -> list[list[str]]:
    """The layers of each part, by name, in order.

    Args:
        parts_a_stage: 1, or 2 to cut every stage in the middle.

    Raises:
        UnfitError: the job is no chain on the CPU, or a stage has too few layers.
        ConfigError: there are more stages than layers.
    """
    if config.graph() != graph.chain(config.stage_names):
        raise UnfitError("the stages are no chain")
    places = [devices.resolve(config.stage(index).device) for index in range(config.num_stages)]
    if any(place.type != "cpu" for place in places):
        raise UnfitError("Gloo sends only what lies on the CPU")
    stages = [assignment.layers for assignment in plan.assign(config)]
    if parts_a_stage == 1:
        return stages
    if min(map(len, stages)) < 2:
        raise UnfitError("a stage of one layer cannot be cut in two")
    halves = [(names[: len(names) // 2], names[len(names) // 2 :]) for names in stages]
    return list(itertools.chain.from_iterable(halves))


def build(config: Config, stage_index: int, names: list[str]) -> Part:
    """A part with the parameters that the pipelined job starts with.

    Args:
        stage_index: of the stage that the part belongs to.
        names: of its layers.
    """
    settings = config.stage(stage_index)
    built = layers.build(config, stage_index, names)
    module = nn.Sequential(*built.values()).train()
    if settings.frozen:
        module.requires_grad_(False)
    trained = {
        config.prefix_of(layer) + name: parameter
        for layer, its in built.items()
        for name, parameter in its.named_parameters()
        if parameter.requires_grad
    }
    if not trained:
        return Part(module, None)
    return Part(module, optimizers.create(config.optimizer_of(stage_index), trained))


def slice_loss(config: Config, num_slices: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of one of `num_slices` equal slices, so that they add up to the mini-batch's.

    A mean is divided here, as ours is, and not in every gradient afterwards.
    """
    loss = factory.function(config.loss, "loss")
    keywords = getattr(loss, "keywords", {})
    if getattr(loss, "reduction", keywords.get("reduction")) == "sum" or num_slices == 1:
        return loss
    return lambda outputs, targets: loss(outputs, targets) / num_slices


def endless_batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """The job's mini-batches, epoch after epoch.

    Raises:
        ConfigError: there is no `[data]`.
        UnfitError: they are not one tensor in and one out.
    """
    section = config.require_data("a benchmark")
    batches = data.load(section.train, "data.train", section, config.seed, training=True)
    for epoch in itertools.count(1):
        for inputs, targets in batches.epoch(epoch):
            if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
                raise UnfitError("inputs and targets are not one tensor each")
            yield inputs, targets


def require_equal_microbatches(inputs: Tensor, num_microbatches: int) -> None:
    """Means over micro-batches are means over samples only if they are equally large.

    Raises:
        UnfitError: they are not.
    """
    if inputs.shape[0] % num_microbatches:
        raise UnfitError(
            f"{inputs.shape[0]} samples do not make {num_microbatches} equal micro-batches"
        )
