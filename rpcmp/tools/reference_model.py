"""The reference of `rpcmp verify`: plain PyTorch on the user's modules, in one process.

It imports nothing of the data plane, so that an error there cannot hide here. With the stages it
shares how callables and parameter groups are made (`rpcmp.pipelining.optimizers`), and how small a
micro-batch may be and how parts of a loss are added (`rpcmp.pipelining.pytree`), which have tests
of their own. It walks nested batches by itself. These rules make its bits comparable with those of
a pipelined run:

- A mini-batch is cut by `torch.tensor_split` into slices with storage of their own, none of fewer
  than `data.min_microbatch` samples. Each slice's loss counts its share of the samples, or of
  what the config's `loss_weight` counts; a slice without a share has no loss, and no gradient.
- Before each layer the generators are seeded by (seed, "train", step, micro-batch, layer).
- Every (reader, input) gets its own clone, whose gradient is contiguous. What passes between the
  layers of a stage, forwards or as a gradient, is contiguous and aligned to 64 bytes.
- Stages run in topological order. One optimizer per stage steps after all slices, the generators
  seeded by (seed, "optimizer", step, stage).
- A loss that is a module is one of the sink's, called "loss".
- There is a region of autocast per call of a layer, and one for the loss.

A `module` that the job cuts is not cut here: see `rpcmp.tools.reference_module`.
`rpcmp.tools.reference_parts` has the rules for loss scaling, replicas and tied parameters.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpcmp.config import importing
from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.config.topology import Reference
from rpcmp.data.loading import TrainBatches, training_batches
from rpcmp.errors import JobError, RpcmpError
from rpcmp.pipelining import assignment, devices, layers, microbatches, optimizers, random_streams
from rpcmp.process import compiler
from rpcmp.process.channel import Message
from rpcmp.rpc.tensors import save_tensors
from rpcmp.tools.reference_module import EagerModule
from rpcmp.tools.reference_parts import (
    ReferenceSteps,
    ReferenceTies,
    Replicas,
    autocast,
    compiled_call,
)


def train(message: Message) -> Iterator[Message]:
    """Task: train the unsplit model and save its state; answers with each step's loss."""
    try:
        yield from _train(message)
    except RpcmpError:
        raise
    except Exception as error:
        raise JobError(f"reference: {explain_error(error)}") from error


def _train(message: Message) -> Iterator[Message]:
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    batches = training_batches(config, "training the unsplit model")
    model = UnsplitModel(
        config, {part.stage_name: part.layers for part in assignment.assign(config)}
    )
    for loss in model.train(batches, message["steps"]):
        yield {"event": "step", "loss": loss}
    save_tensors(model.state_dict(), Path(message["save_state"]))
    yield {"event": "done", "host": devices.host_facts(), "depends": model.depends_on_parts}


class UnsplitModel:
    """All stages in one process; `layer_names` has the layers of each stage by its name.

    Attributes:
        depends_on_parts: what makes a difference between micro-batches and a whole mini-batch, as
            far as training has shown: "batch normalization" or "dropout"; else empty.
    """

    def __init__(self, config: Config, layer_names: dict[str, list[str]]) -> None:
        self._config = config
        self._graph = config.graph()
        random_streams.seed_all(config.seed, "init", "loss")
        self._loss = importing.load_function(config.loss, "loss")
        self._weigh: Callable[..., Any] | None = None
        if config.weighing is not None:
            self._weigh = importing.load_function(config.weighing, "loss_weight")
        self._modules: dict[str, dict[str, nn.Module]] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._schedulers: list[Any] = []
        self._smallest = 1
        for index, stage in enumerate(config.stage_names):
            self._modules[stage] = layers.build_layers(config, index, layer_names[stage])
            self._add_optimizer(index, stage)
        self._eager: EagerModule | None = None
        self._calls: dict[nn.Module, Callable[..., Any]] = {}
        for index in range(config.num_stages):
            if config.compiles(index):
                compiler.prepare()
                compiled = self._modules[config.stage_names[index]].values()
                self._calls |= {module: compiled_call(module) for module in compiled}
        if config.cut is not None and not self._calls:
            every = {n: m for modules in self._modules.values() for n, m in modules.items()}
            self._eager = EagerModule(
                config, every, self._seed_layer, functools.partial(_map, _between_layers)
            )
        self._place = (0, 0)  # step, micro-batch
        self._seeded: Tensor | None = None
        self.depends_on_parts = ""
        self._autocast = {
            stage: autocast(config, index) for index, stage in enumerate(config.stage_names)
        }
        self._steps = ReferenceSteps(config, self._optimizers)
        self._ties = ReferenceTies(config.tied, self._named_parameters())
        self._replicas = [
            Replicas(self._all_modules(worker.stage), config.turns_of(worker.stage))
            for worker in config.workers
            if worker.num_replicas > 1 and worker.replica == 0
        ]

    def train(self, batches: TrainBatches, steps: int) -> Iterator[float]:
        for modules in self._modules.values():
            for module in modules.values():
                module.train()
        self._smallest = self._smallest_microbatch()
        if self._smallest > 1:
            self.depends_on_parts = "batch normalization"
        step = 0
        for epoch in range(1, 2 + (steps - 1) // len(batches)):
            total = 0.0  # added one by one: `sum` rounds otherwise since Python 3.12
            for inputs, targets in batches.epoch(epoch):
                step += 1
                loss = self._step(inputs, targets, step)
                total += loss
                yield loss
                if step == steps:
                    return
            if self._config.scheduler_interval == "epoch":
                self._step_schedulers(total / len(batches))

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name; tied ones under each of their names."""
        if self._eager is not None:
            base, state = self._config.base, self._eager.module.state_dict()
            state = {name: value for name, value in state.items() if name not in base}
        else:
            state = {
                self._config.prefix_of(layer) + name: value
                for modules in self._modules.values()
                for layer, module in modules.items()
                for name, value in module.state_dict().items()
                if isinstance(value, Tensor)
            }
        if isinstance(self._loss, nn.Module):
            state |= self._loss.state_dict(prefix="loss.")
        return state

    def parameters(self) -> list[nn.Parameter]:
        trained = [
            parameter
            for name, parameter in self._named_parameters().items()
            if parameter.requires_grad and name not in self._config.tied_to
        ]
        return list(dict.fromkeys(trained))

    def _named_parameters(self, *stages: str) -> dict[str, nn.Parameter]:
        named = {
            self._config.prefix_of(layer) + name: parameter
            for stage in stages or self._modules
            for layer, module in self._modules[stage].items()
            for name, parameter in module.named_parameters()
        }
        if isinstance(self._loss, nn.Module) and self._graph.sink in (stages or self._modules):
            named |= {f"loss.{name}": each for name, each in self._loss.named_parameters()}
        return named

    def _all_modules(self, stage: str) -> list[nn.Module]:
        own = [*self._modules[stage].values()]
        if stage == self._graph.sink and isinstance(self._loss, nn.Module):
            own.append(self._loss)
        return own

    def _step(self, inputs: Any, targets: Any, step: int) -> float:
        sliced = list(zip(self._slices(inputs), self._slices(targets), strict=True))
        shares = self._shares(sliced)
        losses = []
        for index, part in enumerate(sliced):
            bundle = self._bundle(index, len(sliced))
            for replicas in self._replicas:
                replicas.enter(bundle)
            losses.append(self._micro_batch(*part, step, index, shares[index]))
            for replicas in self._replicas:
                replicas.leave(bundle)
        for replicas in self._replicas:
            replicas.sum()
        self._ties.sum()
        has_stepped = self._steps.step(self.parameters(), step)
        self._ties.copy_values()
        for parameter in self.parameters():
            parameter.grad = None
        loss = microbatches.exact_sum(losses)
        if self._config.scheduler_interval == "step" and has_stepped:
            self._step_schedulers(loss)
        return loss

    def _bundle(self, index: int, count: int) -> int:
        """Return the number of the message that a micro-batch would travel in."""
        bundles = enumerate(self._config.bundles(count))
        return next(number for number, bundle in bundles if index in bundle)

    def _shares(self, sliced: list[tuple[Any, Any]]) -> list[float]:
        if self._weigh is None:
            weights = [float(_first(inputs).shape[0]) for inputs, _ in sliced]
        else:
            weights = [float(self._weigh(targets)) for _, targets in sliced]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    def _micro_batch(self, inputs: Any, targets: Any, step: int, index: int, share: float) -> float:
        outputs = self._forward(inputs, targets, step, index)
        if not share:
            loss = _zero(outputs)
        else:
            with self._autocast[self._graph.sink]:
                loss = self._loss(outputs, targets).reshape(())
            if not self._sums_samples():
                loss = loss * share
        self._steps.scale(loss).backward()
        return float(loss.item())

    def _forward(self, inputs: Any, targets: Any, step: int, index: int) -> Any:
        outputs = self._through_stages(inputs, targets, step, index)
        self._note_draws()
        self._seeded = None
        return outputs

    def _through_stages(self, inputs: Any, targets: Any, step: int, index: int) -> Any:
        self._place = step, index
        if self._eager is not None:
            with self._autocast[self._graph.sink]:
                return self._eager(_map(_clone, inputs))
        values: dict[str, Any] = {"input": inputs, "target": targets}
        for stage, references in self._graph.inputs.items():
            read = [_map(_clone, _part(values, reference)) for reference in references]
            values[stage] = self._run_stage(stage, read)
        return values[self._graph.sink]

    def _run_stage(self, stage: str, read: list[Any]) -> Any:
        for position, (layer, module) in enumerate(self._modules[stage].items()):
            if position:
                read = [_map(_between_layers, read[0])]
            self._seed_layer(layer)
            with self._autocast[stage]:
                read = [self._calls.get(module, module)(*read)]
        return read[0]

    def _seed_layer(self, layer: str) -> None:
        self._note_draws()
        random_streams.seed_all(self._config.seed, "train", *self._place, layer)
        self._seeded = torch.get_rng_state() if self._place[0] == 1 else None

    def _note_draws(self) -> None:
        """Note in the first step whether the layer before has drawn random numbers."""
        if self._seeded is not None and not torch.equal(self._seeded, torch.get_rng_state()):
            self.depends_on_parts = self.depends_on_parts or "dropout"

    def _slices(self, batch: Any) -> list[Any]:
        samples = _first(batch).shape[0]
        count = max(1, min(samples // self._smallest, self._config.num_microbatches))

        def piece(index: int, tensor: Tensor) -> Tensor:
            return torch.tensor_split(tensor, count)[index].clone()

        return [_map(functools.partial(piece, index), batch) for index in range(count)]

    def _smallest_microbatch(self) -> int:
        """Return how many samples a slice has at least, if its mini-batch has that many."""
        section = self._config.data
        if section is not None and section.min_microbatch is not None:
            return section.min_microbatch
        return microbatches.smallest_for(
            module for modules in self._modules.values() for module in modules.values()
        )

    def _sums_samples(self) -> bool:
        keywords = getattr(self._loss, "keywords", {})
        return getattr(self._loss, "reduction", keywords.get("reduction")) == "sum"

    def _add_optimizer(self, index: int, stage: str) -> None:
        settings = self._config.stage(index)
        named: dict[nn.Parameter, str] = {}
        for name, parameter in self._named_parameters(stage).items():
            named.setdefault(parameter, name)
        if settings.frozen:
            for parameter, name in named.items():
                parameter.requires_grad_(name.startswith("loss."))
        trained = {
            name: parameter
            for parameter, name in named.items()
            if parameter.requires_grad and name not in self._config.tied_to
        }
        if not trained:
            return
        optimizer = optimizers.create(self._config.optimizer_of(index), trained)
        self._optimizers[stage] = optimizer
        schedule = self._config.scheduler_of(index)
        if schedule is not None:
            self._schedulers.append(importing.create(schedule, "scheduler", optimizer))

    def _step_schedulers(self, loss: float) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()


def _clone(tensor: Tensor) -> Tensor:
    clone = tensor.clone(memory_format=torch.contiguous_format)
    if clone.requires_grad:
        clone.register_hook(
            lambda gradient: gradient if gradient is None else gradient.contiguous()
        )
    return clone


def _between_layers(tensor: Tensor) -> Tensor:
    tensor = _regular(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(lambda gradient: gradient if gradient is None else _regular(gradient))
    return tensor


def _regular(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _part(values: dict[str, Any], reference: Reference) -> Any:
    value = values[reference.producer]
    for key in reference.path:
        value = value[key] if isinstance(value, dict) else value[int(key)]
    return value


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(function, item) for item in value)
    return value


def _zero(outputs: Any) -> Tensor:
    """Return a loss of zero whose gradient is zero, whatever the outputs are."""
    nothing: list[Tensor] = []
    _map(lambda tensor: nothing.append(tensor.reshape(-1)[:0]), outputs)
    return sum((part.sum().float() for part in nothing if part.requires_grad), torch.zeros(()))


def _first(batch: Any) -> Tensor:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch
