"""What a peer's process is told at its start; travels as JSON.

The unsplit model in one process: the whole mini-batch at once, or micro-batch by micro-batch.

Small slices stay in the caches, a whole mini-batch calls each kernel once: which of the two is
faster depends on the model, so the benchmark tries both.

Consecutive layers of the job as plain PyTorch: what every peer is made of.

How long each stage computes for one micro-batch, alone on the machine: what the bound is of.

One rank of torch.distributed.pipelining over Gloo.

Its best: one thread of compute a rank, mini-batches loaded before the clock starts, no outputs
merged, and the loss divided by the number of micro-batches instead of every gradient.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from rpcmp.config import importing, topology
from rpcmp.config.schema import Config
from rpcmp.config.types import Strict
from rpcmp.data.batches import load_batches
from rpcmp.errors import UnsupportedJobError
from rpcmp.pipelining import devices, layers, optimizers
from rpcmp.pipelining.assignment import assign
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.process.channel import Message

WHOLE_BATCH = "whole batch"

ONE_PROCESS_WAYS = [WHOLE_BATCH, "micro-batches"]
"""How the unsplit model may be trained."""

Kind = Literal["one-process", "torch-pipelining", "stage-times"]


class TrainerConfig(Strict):
    """One process of a peer.

    Attributes:
        kind: what it does.
        config, halves: the case's.
        folder: of the user's Python files; empty where there are none.
        rank, world_size: its place among the peer's processes.
        store: path of a file through which they find each other.
    """

    kind: Kind
    config: Config
    halves: Config
    folder: str
    rank: int
    world_size: int
    store: str


@dataclass(frozen=True)
class ModelPart:
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
        UnsupportedJobError: the job is no chain on the CPU, or a stage has too few layers.
        ConfigError: there are more stages than layers.
    """
    if config.graph() != topology.chain_graph(config.stage_names):
        raise UnsupportedJobError("the stages are no chain")
    places = [
        devices.resolve_device(config.stage(index).device) for index in range(config.num_stages)
    ]
    if any(place.type != "cpu" for place in places):
        raise UnsupportedJobError("Gloo sends only what lies on the CPU")
    stages = [assignment.layers for assignment in assign(config)]
    if parts_a_stage == 1:
        return stages
    if min(map(len, stages)) < 2:
        raise UnsupportedJobError("a stage of one layer cannot be cut in two")
    halves = [(names[: len(names) // 2], names[len(names) // 2 :]) for names in stages]
    return list(itertools.chain.from_iterable(halves))


def build(config: Config, stage_index: int, names: list[str]) -> ModelPart:
    """A part with the parameters that the pipelined job starts with.

    Args:
        stage_index: of the stage that the part belongs to.
        names: of its layers.
    """
    settings = config.stage(stage_index)
    built = layers.build_layers(config, stage_index, names)
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
        return ModelPart(module, None)
    return ModelPart(module, optimizers.create(config.optimizer_of(stage_index), trained))


def slice_loss(config: Config, num_slices: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of one of `num_slices` equal slices, so that they add up to the mini-batch's.

    A mean is divided here, as ours is, and not in every gradient afterwards.
    """
    loss = importing.function(config.loss, "loss")
    keywords = getattr(loss, "keywords", {})
    if getattr(loss, "reduction", keywords.get("reduction")) == "sum" or num_slices == 1:
        return loss
    return lambda outputs, targets: loss(outputs, targets) / num_slices


def endless_batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """The job's mini-batches, epoch after epoch.

    Raises:
        ConfigError: there is no `[data]`.
        UnsupportedJobError: they are not one tensor in and one out.
    """
    section = config.require_data("a benchmark")
    batches = load_batches(section.train, "data.train", section, config.seed, training=True)
    for epoch in itertools.count(1):
        for inputs, targets in batches.epoch(epoch):
            if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
                raise UnsupportedJobError("inputs and targets are not one tensor each")
            yield inputs, targets


def require_equal_microbatches(inputs: Tensor, num_microbatches: int) -> None:
    """Means over micro-batches are means over samples only if they are equally large.

    Raises:
        UnsupportedJobError: they are not.
    """
    if inputs.shape[0] % num_microbatches:
        raise UnsupportedJobError(
            f"{inputs.shape[0]} samples do not make {num_microbatches} equal micro-batches"
        )


class OneProcess:
    """The peer "one process"; the number of threads is set by its environment."""

    def __init__(self, order: TrainerConfig) -> None:
        self._config = order.config

    def build(self, way: str) -> None:
        """See Peer; the ways are ONE_PROCESS_WAYS."""
        names = layer_names(self._config)
        self._parts = [build(self._config, i, layers) for i, layers in enumerate(names)]
        self._batches = endless_batches(self._config)
        self._num_slices = 1 if way == WHOLE_BATCH else self._config.num_microbatches
        self._loss = slice_loss(self._config, self._num_slices)
        inputs, _ = next(endless_batches(self._config))
        require_equal_microbatches(inputs, self._num_slices)

    def run(self, steps: int) -> Message:
        """See Peer. The mini-batches are loaded before the clock starts."""
        batches = [next(self._batches) for _ in range(steps)]
        begin = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        return {"begin": begin, "end": time.monotonic_ns(), "losses": losses}

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        count = self._num_slices
        slices = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        loss = sum(self._slice(x, y) for x, y in slices)
        for each in self._parts:
            each.step()
        return loss

    def _slice(self, x: Tensor, y: Tensor) -> float:
        for each in self._parts:
            x = each.module(x)
        loss = self._loss(x, y)
        loss.backward()
        return loss.item()


Stage = Callable[[Tensor], Tensor]
Result = TypeVar("Result")


class StageClock:
    """Measures the stages one after the other; the loss belongs to the last one."""

    def __init__(self, order: TrainerConfig) -> None:
        self._config = order.config

    def build(self, way: str) -> None:
        """See Peer; there is one way."""
        names = layer_names(self._config)
        self._parts = [build(self._config, i, layers) for i, layers in enumerate(names)]
        inputs, targets = next(endless_batches(self._config))
        count = self._config.num_microbatches
        self._loss = slice_loss(self._config, count)
        require_equal_microbatches(inputs, count)
        self._inputs, self._targets = inputs.chunk(count)[0], targets.chunk(count)[0]

    def run(self, steps: int) -> Message:
        """The medians of `steps` measurements of each stage."""
        x, times = self._inputs, []
        *first, last = (each.module for each in self._parts)
        for module in first:
            times.append(_measure(module, x, steps))
            x = module(x).detach().requires_grad_()
        times.append(_measure(lambda value: self._loss(last(value), self._targets), x, steps))
        return {"stages": times}


def _measure(stage: Stage, x: Tensor, repeats: int) -> ActionTimes:
    found = [_measure_once(stage, x) for _ in range(repeats + 1)][1:]  # the first one warms up
    return ActionTimes(*(statistics.median(column) for column in zip(*found, strict=True)))


def _measure_once(stage: Stage, x: Tensor) -> tuple[float, float, float]:
    """Seconds of the forward, of the input gradient alone, and of the rest of a whole backward."""
    forward, y = _timed(lambda: stage(x))
    gradient = torch.ones_like(y)
    to_input = 0.0
    if x.requires_grad:
        to_input, _ = _timed(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True))
    whole, _ = _timed(lambda: torch.autograd.backward(y, gradient))
    return forward, to_input, max(0.0, whole - to_input)


def _timed(action: Callable[[], Result]) -> tuple[float, Result]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


SINGLE = {"1f1b": Schedule1F1B}
"""Schedules with one stage a rank."""

DOUBLE = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""Schedules with two stages a rank. Each of them is half of one of our stages: each rank does the
same work as with one stage, in twice as many actions."""


class TorchRank:
    """The peer "torch.distributed.pipelining"; the ways are the schedules' names."""

    def __init__(self, order: TrainerConfig) -> None:
        self._order = order
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order.store}",
            rank=order.rank,
            world_size=order.world_size,
        )

    def build(self, way: str) -> None:
        """See Peer."""
        config = self._order.config if way in SINGLE else self._order.halves
        names = layer_names(config, 1 if way in SINGLE else 2)
        indices = self._indices(way)
        per_stage = len(names) // self._order.world_size
        self._parts = [build(config, i // per_stage, names[i]) for i in indices]
        stages = [
            PipelineStage(each.module, index, len(names), torch.device("cpu"))
            for each, index in zip(self._parts, indices, strict=True)
        ]
        self._is_first, self._is_last = 0 in indices, len(names) - 1 in indices
        inputs, _ = next(endless_batches(config))
        require_equal_microbatches(inputs, config.num_microbatches)
        self._batches = endless_batches(config)
        self._schedule = self._create(way, stages)

    def run(self, steps: int) -> Message:
        """See Peer. All ranks' clocks are this machine's; the barrier comes before they start."""
        batches = [next(self._batches) for _ in range(steps)]
        dist.barrier()
        begin = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        end = time.monotonic_ns()
        found = [float(sum(each)) for each in losses] if self._is_last else []
        return {"begin": begin, "end": end, "losses": found}

    def _step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if self._is_first else []),
            **({"target": targets, "losses": losses} if self._is_last else {}),
            return_outputs=False,
        )
        for each in self._parts:
            each.step()
        return [loss.detach() for loss in losses]

    def _indices(self, way: str) -> list[int]:
        """Which parts this rank has: its own, of a loop, or of a V that returns to rank 0."""
        rank, size = self._order.rank, self._order.world_size
        if way in SINGLE:
            return [rank]
        return [rank, 2 * size - 1 - rank] if way == "zbv" else [rank, size + rank]

    def _create(self, way: str, stages: list[Any]) -> Any:
        count = self._order.config.num_microbatches
        loss = slice_loss(self._order.config, count)
        try:
            if way in SINGLE:
                return SINGLE[way](stages[0], count, loss, scale_grads=False)
            return DOUBLE[way](stages, count, loss, scale_grads=False)
        except ValueError as error:  # how torch refuses a number of micro-batches
            raise UnsupportedJobError(str(error)) from error
