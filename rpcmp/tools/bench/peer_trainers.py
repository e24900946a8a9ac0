"""Ways to train a benchmark's job without rpcmp, and how long each of its stages computes.

OneProcess    the unsplit model, the whole mini-batch at once or micro-batch by micro-batch. Small
              slices stay in the caches, a whole mini-batch calls each kernel once: which is faster
              depends on the model, so the benchmark tries both.
TorchRank     one rank of torch.distributed.pipelining over Gloo, at its best: mini-batches loaded
              before the clock starts, no outputs merged, and the loss divided by the number of
              micro-batches instead of every gradient.
StageClock    times each stage with one micro-batch, alone on the machine: the bound rests on it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rpcmp.config import importing, topology
from rpcmp.config.schema import Config
from rpcmp.data.loading import training_batches
from rpcmp.errors import UnsupportedJobError
from rpcmp.pipelining import devices, layers, optimizers
from rpcmp.pipelining.assignment import assign
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.process.channel import Message


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers and their optimizer, which is None if nothing in them is trained."""

    module: nn.Sequential
    optimizer: torch.optim.Optimizer | None

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def layer_names(config: Config, parts_per_stage: int = 1) -> list[list[str]]:
    """Return the names of the layers of each part: a stage, or each half of a stage if there are 2.

    Raises:
        UnsupportedJobError: the job is not a chain on the CPU, or a stage has too few layers.
    """
    if config.graph() != topology.chain_graph(config.stage_names):
        raise UnsupportedJobError("the stages are no chain")
    indices = range(config.num_stages)
    if any(devices.resolve_device(config.stage(i).device).type != "cpu" for i in indices):
        raise UnsupportedJobError("Gloo sends only what lies on the CPU")
    stages = [assignment.layers for assignment in assign(config)]
    if parts_per_stage == 1:
        return stages
    if min(map(len, stages)) < 2:
        raise UnsupportedJobError("a stage of one layer cannot be cut in two")
    halves = [(names[: len(names) // 2], names[len(names) // 2 :]) for names in stages]
    return list(itertools.chain.from_iterable(halves))


def build(config: Config, stage_index: int, names: list[str]) -> ModelPart:
    """Build a part with the parameters that the pipelined job starts with."""
    settings = config.stage(stage_index)
    built = layers.build_layers(config, stage_index, names)
    module = nn.Sequential(*built.values()).train()
    if settings.frozen:
        module.requires_grad_(False)
    trained = {
        config.prefix_of(layer) + name: parameter
        for layer, layer_module in built.items()
        for name, parameter in layer_module.named_parameters()
        if parameter.requires_grad
    }
    if not trained:
        return ModelPart(module, None)
    return ModelPart(module, optimizers.create(config.optimizer_of(stage_index), trained))


def build_stages(config: Config) -> list[ModelPart]:
    return [build(config, index, names) for index, names in enumerate(layer_names(config))]


def slice_loss(config: Config, num_slices: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of one of `num_slices` equal slices, which add up to the mini-batch's.

    A mean is divided here, as rpcmp does, and not in every gradient afterwards.
    """
    if config.weighing is not None:
        raise UnsupportedJobError("its micro-batches are weighted, by `loss_weight`")
    loss = importing.load_function(config.loss, "loss")
    keywords = getattr(loss, "keywords", {})
    if getattr(loss, "reduction", keywords.get("reduction")) == "sum" or num_slices == 1:
        return loss
    return lambda outputs, targets: loss(outputs, targets) / num_slices


def endless_batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the job's mini-batches, epoch after epoch."""
    batches = training_batches(config, "a benchmark")
    for epoch in itertools.count(1):
        for inputs, targets in batches.epoch(epoch):
            if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
                raise UnsupportedJobError("inputs and targets are not one tensor each")
            yield inputs, targets


def require_equal_microbatches(inputs: Tensor, num_microbatches: int) -> None:
    """Fail if micro-batches differ in size: the mean of their means is then another loss."""
    if inputs.shape[0] % num_microbatches:
        raise UnsupportedJobError(
            f"{inputs.shape[0]} samples do not make {num_microbatches} equal micro-batches"
        )


def join_gloo(job: Message) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=job["rank"],
        world_size=job["world_size"],
    )


class OneProcess:
    """The unsplit model; the number of threads comes from the environment."""

    def __init__(self, job: Message) -> None:
        self._config = Config.model_validate(job["config"])

    def build(self, way: str) -> None:
        """Build the model, to be trained by "whole batch" or "micro-batches"."""
        self._parts = build_stages(self._config)
        self._batches = endless_batches(self._config)
        self._num_slices = 1 if way == "whole batch" else self._config.num_microbatches
        self._loss = slice_loss(self._config, self._num_slices)
        inputs, _ = next(endless_batches(self._config))
        require_equal_microbatches(inputs, self._num_slices)

    def run(self, steps: int) -> Message:
        # Loaded before the clock starts.
        batches = [next(self._batches) for _ in range(steps)]
        start = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        return {"begin": start, "end": time.monotonic_ns(), "losses": losses}

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


class StageClock(OneProcess):
    """Times the stages one after the other; the loss belongs to the last one."""

    def run(self, steps: int) -> Message:
        """Return the medians of `steps` measurements of each stage with one micro-batch."""
        x, targets = (whole.chunk(self._num_slices)[0] for whole in next(self._batches))
        times = []
        *first, last = (each.module for each in self._parts)
        for module in first:
            times.append(_measure(module, x, steps))
            x = module(x).detach().requires_grad_()
        times.append(_measure(lambda value: self._loss(last(value), targets), x, steps))
        return {"stages": times}


def _measure(stage: Stage, x: Tensor, repeats: int) -> ActionTimes:
    rows = [_measure_once(stage, x) for _ in range(repeats + 1)][1:]  # the first one warms up
    return ActionTimes(*(statistics.median(column) for column in zip(*rows, strict=True)))


def _measure_once(stage: Stage, x: Tensor) -> tuple[float, float, float]:
    """Return the seconds of forward, input gradient alone, and the rest of a whole backward."""
    forward, y = _timed(lambda: stage(x))
    gradient = torch.ones_like(y)
    to_input = 0.0
    if x.requires_grad:
        to_input, _ = _timed(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True))
    whole, _ = _timed(lambda: torch.autograd.backward(y, gradient))
    return forward, to_input, max(0.0, whole - to_input)


def _timed(action: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


SINGLE = {"1f1b": "Schedule1F1B"}
"""Schedules with one stage per rank."""

DOUBLE = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""Schedules with two stages per rank, each half of one of rpcmp's stages: each rank does the same
work as with one stage, in twice as many actions."""


class TorchRank:
    """One rank of torch.distributed.pipelining; the ways are the names of its schedules."""

    def __init__(self, job: Message) -> None:
        self._config = Config.model_validate(job["config"])
        self._halves = Config.model_validate(job["halves"])
        self._rank: int = job["rank"]
        self._world_size: int = job["world_size"]
        join_gloo(job)

    def build(self, way: str) -> None:
        from torch.distributed import pipelining  # imports torch's compiler, for seconds

        config = self._config if way in SINGLE else self._halves
        names = layer_names(config, 1 if way in SINGLE else 2)
        indices = self._indices(way)
        per_stage = len(names) // self._world_size
        self._parts = [build(config, i // per_stage, names[i]) for i in indices]
        stages = [
            pipelining.PipelineStage(each.module, index, len(names), torch.device("cpu"))
            for each, index in zip(self._parts, indices, strict=True)
        ]
        self._is_first, self._is_last = 0 in indices, len(names) - 1 in indices
        inputs, _ = next(endless_batches(config))
        require_equal_microbatches(inputs, config.num_microbatches)
        self._batches = endless_batches(config)
        create = getattr(pipelining, (SINGLE | DOUBLE)[way])
        loss = slice_loss(config, config.num_microbatches)
        try:
            self._schedule = create(
                stages[0] if way in SINGLE else stages,
                config.num_microbatches,
                loss,
                scale_grads=False,
            )
        except ValueError as error:  # how torch refuses a number of micro-batches
            raise UnsupportedJobError(str(error)) from error

    def run(self, steps: int) -> Message:
        batches = [next(self._batches) for _ in range(steps)]
        dist.barrier()
        start = time.monotonic_ns()  # all ranks are on this machine, and so share its clock
        losses = [self._step(*batch) for batch in batches]
        end = time.monotonic_ns()
        sums = [float(sum(each)) for each in losses] if self._is_last else []
        return {"begin": start, "end": end, "losses": sums}

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
        """Return the parts of this rank: one, two of a loop, or two of a V that ends at rank 0."""
        rank, size = self._rank, self._world_size
        if way in SINGLE:
            return [rank]
        return [rank, 2 * size - 1 - rank] if way == "zbv" else [rank, size + rank]
