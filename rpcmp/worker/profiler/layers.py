"""All layers of a model on this host, one after the other: only the largest has to fit.

Where stages are modules of their own, each of them is one layer.

One layer, run and timed as a stage of its own would be: the same model, tape and split.

Bytes of what a layer keeps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES, Reference
from rpcmp.errors import JobError, RpcmpError
from rpcmp.pipelining import devices, layers, optimizers, pytree
from rpcmp.pipelining.assignment import Assignment
from rpcmp.pipelining.layer_profile import HostProfile, LayerProfile, ProfileOrder
from rpcmp.rpc.messages import MicrobatchMeta, Mode, RoundHeader, StageOutputs
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.model import StageModel
from rpcmp.worker.weight_grad import Splitter


class Storages:
    """The memory of tensors, counted once where several share it."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._sizes: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    @property
    def num_bytes(self) -> int:
        """Of all of them together."""
        return sum(self._sizes.values())

    def add(self, tensor: Tensor) -> None:
        """Count one more; its memory must not be freed and used again as long as this counts."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()

    def without(self, others: Storages) -> int:
        """Bytes that none of `others` has."""
        own = self._sizes.items()
        return sum(size for pointer, size in own if pointer not in others._sizes)


def measure(order: ProfileOrder, inputs: Any, targets: Any) -> HostProfile:
    """Each layer's times and bytes, fed with what the one before returns.

    Args:
        order: the job, as one stage.
        inputs, targets: of one micro-batch: trees of tensors (samples, ...).

    Raises:
        FactoryError: a layer cannot be built.
        JobError: one failed when it was run.
    """
    device = devices.resolve_device(order.config.stage(0).device)
    _load_lazily_loaded(order)
    base, available = devices.base_bytes(device), devices.available_bytes(device)
    one_by_one = _measure_graph if order.config.model is None else _measure_chain
    found = one_by_one(order, inputs, targets)
    return HostProfile(layers=found, base_bytes=base, available_bytes=available)


def _measure_chain(order: ProfileOrder, inputs: Any, targets: Any) -> list[LayerProfile]:
    names = list(layers.chain_layers(order.config))
    found = []
    for name in names:
        wanted = targets if name == names[-1] else None
        profile, inputs = _measure_layer(order, name, [inputs], wanted)
        found.append(profile)
    return found


def _measure_graph(order: ProfileOrder, inputs: Any, targets: Any) -> list[LayerProfile]:
    """Each stage, fed with what it reads; in the config's order."""
    config, graph = order.config, order.config.graph()
    has: dict[str, Any] = dict(zip(SOURCES, (inputs, targets), strict=True))
    found: dict[str, LayerProfile] = {}
    for name in graph.stages:
        given = [_part(name, reference, has) for reference in graph.inputs[name]]
        wanted, index = targets if name == graph.sink else None, config.stage_names.index(name)
        found[name], has[name] = _measure_layer(order, name, given, wanted, index)
    return [found[name] for name in config.stage_names]


def _part(stage: str, reference: Reference, has: dict[str, Any]) -> Any:
    try:
        return pytree.select(has[reference.producer], reference.path)
    except LookupError as error:
        raise JobError(f"stage {stage!r} reads {str(reference)!r}: {error}") from error


def _load_lazily_loaded(order: ProfileOrder) -> None:
    """Train a tiny model: torch loads some 100 MiB of itself only then, in a worker as well."""
    model = nn.Linear(2, 2, bias=False)  # some optimizers take matrices only
    optimizer = optimizers.create(order.config.optimizer_of(0), dict(model.named_parameters()))
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def _measure_layer(
    order: ProfileOrder, name: str, inputs: list[Any], targets: Any, stage_index: int = 0
) -> tuple[LayerProfile, Any]:
    """What was measured, and what whoever reads the layer gets."""
    try:
        layer = Layer(order.config, name, inputs, targets, stage_index)
        found = layer.measure()
        return found, pytree.map_tensors(
            lambda tensor: _received(tensor, order.differentiates), layer.outputs
        )
    except RpcmpError:
        raise
    except BaseException as error:  # sys.exit() in a layer as well
        text = f"measuring the layer {name!r} failed: {importing.explain_error(error)}"
        raise JobError(
            f"{text}\nit had received {', '.join(map(pytree.describe, inputs))}"
        ) from error


def _received(tensor: Tensor, differentiates: bool) -> Tensor:
    """What the next layer gets: needs a gradient if this one's output did, or layers before it."""
    needs = tensor.requires_grad or (differentiates and tensor.is_floating_point())
    return tensor.requires_grad_(needs)


REPEATS = 7
"""Of each measurement, after one that warms up."""

SECONDS = 2.0
"""How long a layer may take before it is repeated no more."""


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch."""

    forward: float
    backward: float
    weight: float


class Layer:
    """One layer of the job, on this host.

    Args:
        config: the job, as one stage.
        name: the layer's.
        inputs: what it receives, one tree of tensors (samples, ...) for each of its inputs; those
            get a gradient that require one.
        targets: for the last layer, whose times include the loss; None for the others.
        stage_index: which stage of the config it belongs to.

    Attributes:
        outputs: what it returned, for the next layer; those that require grad did so here.

    Raises:
        FactoryError: it cannot be built.
    """

    def __init__(
        self, config: Config, name: str, inputs: list[Any], targets: Any, stage_index: int = 0
    ) -> None:
        own = Assignment(config=config, stage_index=stage_index, layers=[name])
        self._model = StageModel(own)
        self._inputs, self._targets = inputs, targets
        self._work = _work(inputs, config)
        self._splitter = Splitter()
        trained = {n: value for n, value in self._model.named_parameters() if value.requires_grad}
        self._trained = list(trained.values())
        self._optimizer: torch.optim.Optimizer | None = None
        if self._trained:
            self._optimizer = optimizers.create(config.optimizer_of(stage_index), trained)
        self.outputs: Any = None

    def measure(self) -> LayerProfile:
        """Run the layer as often as time allows; the medians."""
        activations, received = self._measure_activations()
        times = self._repeat()
        update = self._measure_update()
        return LayerProfile(
            forward_s=statistics.median(each.forward for each in times),
            backward_s=statistics.median(each.backward for each in times),
            weight_s=statistics.median(each.weight for each in times),
            update_s=update,
            state_bytes=self._state_bytes(),
            activation_bytes=activations,
            input_bytes=received,
        )

    def _measure_activations(self) -> tuple[int, int]:
        """Bytes that a forward leaves behind, and those of what it received."""
        tape = self._tape()
        saved, kept = Storages(), []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor.detach())
            saved.add(tensor)
            return kept[-1]

        received = Storages(pytree.tensors(tape.inputs))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = self._forward(tape)
        for tensor in pytree.tensors(outputs):
            saved.add(tensor)
        own = Storages([*self._model.state_dict().values(), *pytree.tensors(tape.inputs)])
        self._splitter.calibrate(pytree.tensors(outputs))
        self.outputs = pytree.map_tensors(_detached, outputs)
        return saved.without(own), received.num_bytes

    def _repeat(self) -> list[LayerTimes]:
        """At least one measurement, and one before it that does not count."""
        started = time.perf_counter()
        self._measure_once()
        found = [self._measure_once()]
        while len(found) < REPEATS and time.perf_counter() - started < SECONDS:
            found.append(self._measure_once())
        return found

    def _measure_once(self) -> LayerTimes:
        """Gradients add up, as they do over the micro-batches of a step."""
        tape = self._tape()
        weights = self._splitter.begin()
        started = self._now()
        with weights.watch():
            produced = tape.leave(self._forward(tape))
        forward = self._now()
        ones = [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in produced]
        ready = self._now()
        with weights.defer():
            tape.backward(ones)
        backward = self._now()
        weights.accumulate()
        return LayerTimes(forward - started, backward - ready, self._now() - backward)

    def _forward(self, tape: LocalTape) -> Any:
        with torch.enable_grad():
            outputs = self._model.forward(tape.inputs, self._work)
            if self._targets is None:
                return outputs
            return self._model.loss(outputs, self._targets, self._work)

    def _tape(self) -> LocalTape:
        """Fresh copies: a layer may change in place what it receives."""
        copies = [
            pytree.map_tensors(lambda tensor: _detached(tensor.clone()), each)
            for each in self._inputs
        ]
        return LocalTape([StageOutputs(copy) for copy in copies], self._model.device)

    def _measure_update(self) -> float:
        """Seconds of the optimizer's second step: its first makes its state."""
        if self._optimizer is None:
            return 0.0
        self._optimizer.step()
        started = self._now()
        self._optimizer.step()
        return self._now() - started

    def _state_bytes(self) -> int:
        state = self._optimizer.state_dict() if self._optimizer is not None else {}
        gradients = [value.grad for value in self._trained if value.grad is not None]
        return Storages(
            [*self._model.state_dict().values(), *gradients, *pytree.tensors(state)]
        ).num_bytes

    def _now(self) -> float:
        """Seconds; all that was given to the device is done."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _work(inputs: Any, config: Config) -> MicrobatchMeta:
    samples = next((tensor.shape[0] for tensor in pytree.tensors(inputs) if tensor.dim()), 1)
    count = config.num_microbatches
    return MicrobatchMeta(RoundHeader(1, 1, Mode.TRAIN, samples * count, count, 1), 0, samples)
