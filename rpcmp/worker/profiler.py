"""Measure the time and memory of a model's layers, for `balance = "auto"` and `rpcmp explain`.

    supervisor ──sample──> the driver's host: counts layers, loads a micro-batch ──sampled──>
               ──profile─> a stage's host: runs every layer with it              ──profiled─>

Layers are built and measured one after the other, so only the largest has to fit into memory. Each
is run as a stage of its own would be: with the same model class, tape and split backward. If stages
are modules of their own, each of them counts as one layer.

Medians tell how layers compare. They miss what happens now and then: where a container may use half
a core, a process runs at full speed and then stops for the rest of a period, so that all layers are
a few times as long as their medians say; see `stretch`.
"""

from __future__ import annotations

import base64
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES, Reference
from rpcmp.config.types import format_size
from rpcmp.data.loading import training_batches
from rpcmp.errors import ConfigError, JobError, RpcmpError
from rpcmp.pipelining import devices, layers, microbatches, optimizers, pytree
from rpcmp.pipelining.assignment import Assignment
from rpcmp.pipelining.partition import HostProfile, LayerProfile, ProfileOrder
from rpcmp.process.channel import Message
from rpcmp.rpc import tensors
from rpcmp.rpc.messages import MicrobatchMeta, Mode, RoundHeader, StageOutputs
from rpcmp.worker import weight_grad
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.copies import Copies
from rpcmp.worker.model import StageModel
from rpcmp.worker.weight_grad import Splitter

MAX_SAMPLE = 32 * 2**20
"""Bytes of a micro-batch; encoded, it has to fit into a message."""

REPEATS = 7
"""Measurements of each layer, after one that warms up."""

SECONDS = 2.0
"""Time limit per layer, after which it is not measured again."""

STRETCHED = 1.25

Times = list[tuple[float, ...]]
"""What each action of each layer has taken, time after time."""


def sample(message: Message) -> Iterator[Message]:
    """Task: count the layers, and load the first micro-batch of the first epoch."""
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    count = config.num_stages if config.model is None else len(layers.chain_layers(config))
    batches = training_batches(config, "measuring layers")
    batch = next(batches.epoch(1))
    batches.close()
    encoded = tensors.dump_message(microbatches.split(batch, config.num_microbatches)[0])
    if len(encoded) > MAX_SAMPLE:
        raise ConfigError(
            f"a micro-batch of {format_size(len(encoded))} is too large to measure with, which "
            f"takes up to {format_size(MAX_SAMPLE)}: use more micro-batches, or measure nothing (a "
            "list as `balance`, `rpcmp explain --no-measure`)"
        )
    yield {
        "event": "sampled",
        "num_layers": count,
        "sample": base64.b64encode(encoded).decode(),
    }


def profile(message: Message) -> Iterator[Message]:
    """Task: measure the layers with a micro-batch."""
    if message["code_folder"]:
        sys.path.insert(0, message["code_folder"])
    importing.set_allow_list(message["allowed"])
    # Before the user's code is imported: weight gradients are timed apart.
    weight_grad.install()
    inputs, targets = tensors.load_message(base64.b64decode(message["sample"]))
    measured = measure(ProfileOrder.model_validate_json(message["order"]), inputs, targets)
    yield {"event": "profiled", "profile": measured.model_dump()}


def measure(order: ProfileOrder, inputs: Any, targets: Any) -> HostProfile:
    """Measure every layer with the outputs of the layer before it, first with one micro-batch."""
    device = devices.working_device(order.config.stage(0).device)
    _warm_up_torch(order)
    base, available = devices.base_bytes(device), devices.available_bytes(device)
    measure_layers = _measure_graph if order.config.model is None else _measure_chain
    times: Times = []
    if order.config.cut is None:
        profiles = measure_layers(order, inputs, targets, times)
    else:
        from rpcmp.pipelining import split_layers  # torch.export takes a while to import

        with split_layers.any_values():
            profiles = measure_layers(order, inputs, targets, times)
    found = HostProfile(
        layers=profiles,
        base_bytes=base,
        available_bytes=available,
        num_devices=max(1, len(devices.alike(device.type))),
    )
    return found.scaled(stretch(times))


def stretch(times: Sequence[Sequence[float]]) -> float:
    """Return how many times their medians all these take on average, together; 1: about as long.

    The one that is longest beyond its median does not count: it may have happened once. Nor does
    less than `STRETCHED`, which is what others on the machine do in passing.
    """
    medians = [statistics.median(each) for each in times]
    beyond = [
        (number - middle) / len(each)
        for each, middle in zip(times, medians, strict=True)
        for number in each
    ]
    total = sum(medians)
    found = 1.0 + (sum(beyond) - max(beyond)) / total if total else 1.0
    return found if found >= STRETCHED else 1.0


def _measure_chain(
    order: ProfileOrder, inputs: Any, targets: Any, times: Times
) -> list[LayerProfile]:
    try:
        names = list(layers.chain_layers(order.config))
    except RpcmpError as error:
        _blame_missing_init(order.config, error)
        raise
    profiles = []
    for name in names:
        layer_targets = targets if name == names[-1] else None
        layer_profile, inputs = _measure_layer(order, name, [inputs], layer_targets, times)
        profiles.append(layer_profile)
    return profiles


def _measure_graph(
    order: ProfileOrder, inputs: Any, targets: Any, times: Times
) -> list[LayerProfile]:
    """Measure each stage with the outputs that it reads; in the config's order."""
    config, graph = order.config, order.config.graph()
    outputs: dict[str, Any] = dict(zip(SOURCES, (inputs, targets), strict=True))
    profiles: dict[str, LayerProfile] = {}
    for name in graph.stages:
        stage_inputs = [_select(name, reference, outputs) for reference in graph.inputs[name]]
        stage_targets = targets if name == graph.sink else None
        index = config.stage_names.index(name)
        profiles[name], outputs[name] = _measure_layer(
            order, name, stage_inputs, stage_targets, times, index
        )
    return [profiles[name] for name in config.stage_names]


def _select(stage: str, reference: Reference, outputs: dict[str, Any]) -> Any:
    try:
        return pytree.select(outputs[reference.producer], reference.path)
    except LookupError as error:
        raise JobError(f"stage {stage!r} reads {str(reference)!r}: {error}") from error


def _warm_up_torch(order: ProfileOrder) -> None:
    """Train a tiny model: torch loads some 100 MiB of itself only then, in a worker as well."""
    model = nn.Linear(2, 2, bias=False)  # some optimizers take matrices only
    optimizer = optimizers.create(order.config.optimizer_of(0), dict(model.named_parameters()))
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def _measure_layer(
    order: ProfileOrder,
    name: str,
    inputs: list[Any],
    targets: Any,
    times: Times,
    stage_index: int = 0,
) -> tuple[LayerProfile, Any]:
    """Return the layer's profile and its outputs, which are the next layer's inputs."""

    def as_input(tensor: Tensor) -> Tensor:
        """Require a gradient if this layer's output did, or if layers before it need one."""
        return tensor.requires_grad_(
            tensor.requires_grad or (order.differentiates and tensor.is_floating_point())
        )

    try:
        layer = Layer(order.config, name, inputs, targets, stage_index)
        return layer.measure(times), pytree.map_tensors(as_input, layer.outputs)
    except RpcmpError as error:
        _blame_missing_init(order.config, error)
        raise
    except BaseException as error:  # sys.exit() in a layer as well
        text = f"measuring the layer {name!r} failed: {importing.explain_error(error)}"
        raise JobError(
            f"{text}\nit had received {', '.join(map(pytree.describe, inputs))}"
        ) from error


def _blame_missing_init(config: Config, error: RpcmpError) -> None:
    """Raise another error for one that may come from what this host has no copy of."""
    if config.init is not None and not os.path.exists(config.init):
        raise ConfigError(
            f"{error}\nthere is no init = {config.init!r} on {platform.node()}, and it is not sent "
            "for measurements: if that is why, copy it there, or give a list as `balance`"
        ) from error


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, which several tensors may share, by its address.

    The tensors must stay alive as long as the result is used: addresses are used again.
    """
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class Layer:
    """One layer of the job, built on this host.

    Args:
        config: the job, as one stage.
        inputs: one tree of tensors (samples, ...) per input; tensors that require a gradient get
            one.
        targets: for the last layer, whose times include the loss; None for the others.

    Attributes:
        outputs: for the next layer, detached; those that required a gradient still do.
    """

    def __init__(
        self, config: Config, name: str, inputs: list[Any], targets: Any, stage_index: int = 0
    ) -> None:
        own = Assignment(config=config, stage_index=stage_index, layers=[name])
        # Other values take as long, and what is not on this host is not sent to measure it.
        self._model = StageModel(own, loads=os.path.exists(config.init or ""))
        self._inputs, self._targets = inputs, targets
        samples = next((tensor.shape[0] for tensor in pytree.tensors(inputs) if tensor.dim()), 1)
        count = config.num_microbatches
        header = RoundHeader(1, 1, Mode.TRAIN, samples * count, count, 1)
        self._meta = MicrobatchMeta(header, 0, samples)
        self._splitter = Splitter()
        trained = {n: value for n, value in self._model.named_parameters() if value.requires_grad}
        self._trained = list(trained.values())
        self._optimizer: torch.optim.Optimizer | None = None
        if self._trained:
            self._optimizer = optimizers.create(config.optimizer_of(stage_index), trained)
        self.outputs: Any = None

    def measure(self, times: Times) -> LayerProfile:
        """Return the medians of as many runs as time allows; adds all that they are of."""
        activations, received = self._measure_activations()
        own = list(zip(*self._repeat(), strict=True))
        times += own
        forward, backward, weight = map(statistics.median, own)
        update = self._measure_update()
        return LayerProfile(
            forward_s=forward,
            backward_s=backward,
            weight_s=weight,
            update_s=update,
            state_bytes=self._state_bytes(self._gradients()),
            snapshot_bytes=self._state_bytes(),
            activation_bytes=activations,
            input_bytes=received,
        )

    def _measure_activations(self) -> tuple[int, int]:
        """Return the bytes that a forward keeps for its backward, and the bytes of its inputs."""
        tape = self._tape()
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        received = sum(storage_sizes(pytree.tensors(tape.inputs)).values())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._forward(tape)
        produced = pytree.tensors(outputs)
        kept = storage_sizes([*saved, *produced])
        own = storage_sizes([*self._model.state_dict().values(), *pytree.tensors(tape.inputs)])
        self._splitter.calibrate(produced)
        self.outputs = pytree.map_tensors(_detached, outputs)
        return sum(size for address, size in kept.items() if address not in own), received

    def _repeat(self) -> list[tuple[float, float, float]]:
        """Measure at least once, after one measurement that does not count."""
        started = time.perf_counter()
        self._measure_once()
        times = [self._measure_once()]
        while len(times) < REPEATS and time.perf_counter() - started < SECONDS:
            times.append(self._measure_once())
        return times

    def _measure_once(self) -> tuple[float, float, float]:
        """Return the seconds of a forward, a backward and its weight gradients."""
        # Gradients add up, as they do over the micro-batches of a step.
        tape = self._tape()
        weights = self._splitter.next_microbatch()
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
        return forward - started, backward - ready, self._now() - backward

    def _forward(self, tape: LocalTape) -> Any:
        with torch.enable_grad():
            outputs = self._model.forward(tape.inputs, self._meta)
            if self._targets is None:
                return outputs
            return self._model.loss(outputs, self._targets, self._meta)

    def _tape(self) -> LocalTape:
        # Fresh copies: a layer may change its inputs in place.
        copies = [
            pytree.map_tensors(lambda tensor: _detached(tensor.clone()), each)
            for each in self._inputs
        ]
        return LocalTape([StageOutputs(copy) for copy in copies], Copies(self._model.device))

    def _measure_update(self) -> float:
        """Return the seconds of the optimizer's second step; its first creates its state."""
        if self._optimizer is None:
            return 0.0
        self._optimizer.step()
        started = self._now()
        self._optimizer.step()
        return self._now() - started

    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in self._trained if value.grad is not None]

    def _state_bytes(self, gradients: Sequence[Tensor] = ()) -> int:
        state = self._optimizer.state_dict() if self._optimizer is not None else {}
        tensors = [*self._model.state_dict().values(), *gradients, *pytree.tensors(state)]
        return sum(storage_sizes(tensors).values())

    def _now(self) -> float:
        """Return the time in seconds, once the device has finished all work."""
        devices.synchronize(self._model.device)
        return time.perf_counter()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
