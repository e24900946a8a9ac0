"""One layer, run and timed as a stage of its own would be: the same model, tape and split."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpcmp import optimizers, tree
from rpcmp.balance.profile import LayerProfile
from rpcmp.config import Config
from rpcmp.plan import Assignment
from rpcmp.profile.memory import Storages
from rpcmp.split import Splitter
from rpcmp.work import Mode, Outputs, Work
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.model import StageModel

REPEATS = 7
"""Of each measurement, after one that warms up."""

SECONDS = 2.0
"""How long a layer may take before it is repeated no more."""


class Times(NamedTuple):
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

        received = Storages(tree.tensors(tape.inputs))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = self._forward(tape)
        for tensor in tree.tensors(outputs):
            saved.add(tensor)
        own = Storages([*self._model.state_dict().values(), *tree.tensors(tape.inputs)])
        self._splitter.calibrate(tree.tensors(outputs))
        self.outputs = tree.map_tensors(_detached, outputs)
        return saved.without(own), received.num_bytes

    def _repeat(self) -> list[Times]:
        """At least one measurement, and one before it that does not count."""
        started = time.perf_counter()
        self._measure_once()
        found = [self._measure_once()]
        while len(found) < REPEATS and time.perf_counter() - started < SECONDS:
            found.append(self._measure_once())
        return found

    def _measure_once(self) -> Times:
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
        return Times(forward - started, backward - ready, self._now() - backward)

    def _forward(self, tape: LocalTape) -> Any:
        with torch.enable_grad():
            outputs = self._model.forward(tape.inputs, self._work)
            if self._targets is None:
                return outputs
            return self._model.loss(outputs, self._targets, self._work)

    def _tape(self) -> LocalTape:
        """Fresh copies: a layer may change in place what it receives."""
        copies = [
            tree.map_tensors(lambda tensor: _detached(tensor.clone()), each)
            for each in self._inputs
        ]
        return LocalTape([Outputs(copy) for copy in copies], self._model.device)

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
            [*self._model.state_dict().values(), *gradients, *tree.tensors(state)]
        ).num_bytes

    def _now(self) -> float:
        """Seconds; all that was given to the device is done."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _work(inputs: Any, config: Config) -> Work:
    samples = next((tensor.shape[0] for tensor in tree.tensors(inputs) if tensor.dim()), 1)
    return Work(
        round=1,
        step=1,
        microbatch=0,
        num_microbatches=config.num_microbatches,
        accumulated=0,
        num_samples=samples,
        total_samples=samples * config.num_microbatches,
        mode=Mode.TRAIN,
    )
