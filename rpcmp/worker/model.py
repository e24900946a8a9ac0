"""The modules that one stage owns, and how they are run.

Whatever lies between two layers is the same whether or not the model is cut there: every layer
draws from its own random stream, and tensors and gradients that pass from layer to layer are
contiguous and aligned, as they are after a journey between hosts. That is why the bits of a run do
not depend on the balance.

How much memory a stage takes: what is left when a model is too big, and what to trade for speed.

On the CPU it is the process's resident memory, as the kernel counts it; on a GPU it is what torch
has allocated there.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp import metrics
from rpcmp.config import importing, user_code
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.observability.events.event import Memory
from rpcmp.pipelining import devices, layers, microbatch, pytree
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc.messages import Evaluated, MicrobatchMeta, Mode
from rpcmp.worker import precision

HOST = "host"
"""In a signature the name of the host; everything else that is in one has a longer name."""

ALIGNMENT = 64
"""Bytes; what torch's allocator gives fresh tensors. Kernels choose their code by it."""


class StageModel:
    """One stage's layers, and for the sink the loss and the metrics.

    Args:
        assignment: which layers, and the job's config.

    Raises:
        FactoryError: something that the config names does not import or raised.
        ConfigError: the device does not exist here, or cannot compute as `autocast` says.

    Attributes:
        is_sink: whether it computes the loss.
        device: where its modules are.
        foreign: names of parameters that another one is tied to, which alone is stored and trained.
        tells_outputs: whether the driver has metrics of its own, and needs the outputs for them.
    """

    def __init__(self, assignment: Assignment) -> None:
        config = assignment.config
        settings = config.stage(assignment.stage_index)
        self._seed = config.seed
        self._named = config.modules
        self._loaded_elsewhere = _modules_of_data(assignment)
        self._training: bool | None = None
        self.is_sink = config.graph().sink == assignment.stage_name
        self.device = _device(settings.device)
        dtype = config.autocast_of(assignment.stage_index)
        self._autocast = precision.autocast(self.device, dtype)
        self._modules = layers.build_layers(config, assignment.stage_index, assignment.layers)
        self._prefixes = {layer: config.prefix_of(layer) for layer in self._modules}
        own = {name for layer in self._modules for name, _ in self._named_in(layer)}
        self.foreign = own & set(config.tied_to)
        for module in self._modules.values():
            module.to(self.device)
            if settings.frozen:
                module.requires_grad_(False)
        self._loss = importing.function(config.loss, "loss") if self.is_sink else None
        if isinstance(self._loss, nn.Module):
            self._loss.to(self.device)
        self._sums_samples = _sums_samples(self._loss)
        self.tells_outputs = self.is_sink and bool(assignment.driver_metrics)
        self._metrics = {
            name: _metric(metric, f"metrics.{name}")
            for name, metric in (config.metrics.items() if self.is_sink else ())
            if name not in assignment.driver_metrics
        }

    def forward(self, inputs: list[Any], work: MicrobatchMeta) -> Any:
        """The stage's output; the first layer gets `inputs`, the others the output before."""
        self._set_mode(work.mode is Mode.TRAIN)
        for index, (name, module) in enumerate(self._modules.items()):
            layers.seed_all(self._seed, work.mode.value, work.step, work.draw, name)
            with self._autocast:
                inputs = [module(*inputs)]
            if index + 1 < len(self._modules):
                inputs = [pytree.map_tensors(_seam, inputs[0])]
        return inputs[0]

    def _set_mode(self, training: bool) -> None:
        """Call `train` whenever the mode changes, as a plain training loop does."""
        if training is not self._training:
            self._training = training
            for module in self._modules.values():
                module.train(training)

    def loss(self, outputs: Any, targets: Any, work: MicrobatchMeta) -> Tensor:
        """The micro-batch's part of the mini-batch's loss: a scalar, weighted by samples.

        Raises:
            ValueError: the loss function does not return a scalar.
        """
        loss = self._scalar_loss(outputs, self._to_device(targets))
        return loss if self._sums_samples else loss * work.weight

    def evaluate(self, outputs: Any, targets: Any, work: MicrobatchMeta) -> Evaluated:
        """Loss and metrics, each a mean over the samples of the micro-batch."""
        targets = self._to_device(targets)
        loss = float(self._scalar_loss(outputs, targets))
        if self._sums_samples:
            loss /= work.num_samples
        means = {name: float(metric(outputs, targets)) for name, metric in self._metrics.items()}
        return Evaluated(loss, means)

    def _scalar_loss(self, outputs: Any, targets: Any) -> Tensor:
        if self._loss is None:
            raise RuntimeError("only the sink has a loss")
        with self._autocast:
            loss: Tensor = self._loss(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(f"the loss is {pytree.describe(loss)}, not a scalar; reduce it")
        return loss.reshape(())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the unsplit model; shared ones once."""
        seen: set[nn.Parameter] = set()
        for layer in self._modules:
            for name, parameter in self._named_in(layer):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def _named_in(self, layer: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._modules[layer].named_parameters():
            yield self._prefixes[layer] + name, parameter

    def modules(self) -> Iterator[nn.Module]:
        """The layers and all modules inside of them."""
        for layer in self._modules.values():
            yield from layer.modules()

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under their names in the unsplit model; not copied."""
        return {
            whole: value
            for layer, module in self._modules.items()
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
            and (whole := self._prefixes[layer] + name) not in self.foreign
        }

    def smallest_microbatch(self) -> int:
        """Return how many samples a micro-batch needs that this stage is trained with."""
        self._set_mode(training=True)
        return microbatch.smallest_for(self._modules.values())

    def signature(self) -> dict[str, str]:
        """What each parameter and buffer is, and what computes with them, in words; and the host.

        Raises:
            OSError: a Python file cannot be read.
        """
        found = {
            name: f"{value.dtype} of shape {tuple(value.shape)}"
            for name, value in [*self.state_dict().items(), *self.named_parameters()]
        }
        for name, value in self.named_parameters():
            found[name] += ", trained" if value.requires_grad else ", frozen"
        return {HOST: platform.node(), **found, **self._code}

    @cached_property
    def _code(self) -> dict[str, str]:
        """Asked for first when all is built: what is imported later depends on what was computed.

        Of the modules that the job names those count that are imported here: others, such as a
        metric's of the driver, need not be installed.
        """
        imported = {name for name in self._named if name in sys.modules}
        return user_code.of_job(imported | self._loaded_elsewhere)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over this stage's parameters and buffers, by their names in the unsplit model.

        Raises:
            ConfigError: a tensor is missing or has another shape.
        """
        for layer, module in self._modules.items():
            prefix = self._prefixes[layer]
            found = {  # what is tied elsewhere stays
                name: value if prefix + name in self.foreign else state.get(prefix + name)
                for name, value in module.state_dict().items()
            }
            try:
                module.load_state_dict(
                    {n: value for n, value in found.items() if value is not None}
                )
            except RuntimeError as error:
                raise ConfigError(f"layer {layer!r}: {error}") from error

    def _to_device(self, value: Any) -> Any:
        return pytree.map_tensors(lambda tensor: tensor.to(self.device), value)


def _modules_of_data(assignment: Assignment) -> set[str]:
    """The modules that the processes import which load samples for the stage."""
    config = assignment.config
    if config.data is None or not assignment.loads_data:
        return set()
    if not config.graph().parts(assignment.stage_name):
        return set()
    own = (config.data.sampler, config.data.collate)
    sources = [*config.data.factories.values(), *(each for each in own if each is not None)]
    return {source.callable.partition(":")[0] for source in sources}


def _seam(tensor: Tensor) -> Tensor:
    """`tensor` as it would arrive at another stage; so will be its gradient."""
    tensor = _aligned(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(_aligned)
    return tensor


def _aligned(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(
            0, device=devices.resolve_device(name)
        ).device  # which has its number, "cuda:0"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {name!r} is not to be had here: {reason}") from error


def _metric(source: Factory, what: str) -> Callable[..., Any]:
    """A function of (outputs, targets).

    Raises:
        FactoryError: it cannot be had, or is the driver's to compute.
    """
    metric = importing.function(source, what)
    if metrics.keeps_state(metric):
        raise FactoryError(
            f"{what} = {source.callable!r} has update and compute, so the driver has to compute "
            "it, and could not import it: install it there"
        )
    return metric


def _sums_samples(loss: Any) -> bool:
    """Whether the loss adds up over samples, so that micro-batches need no weight."""
    reduction = getattr(loss, "reduction", None) or getattr(loss, "keywords", {}).get("reduction")
    return bool(reduction == "sum")


class Meter:
    """Measures from its making on, when the stage has been built and nothing has run.

    Args:
        device: where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = self._now()

    def read(self) -> Memory:
        """Bytes: "idle", when the stage had been built, and "peak", the most since then."""
        return {"idle": self._idle, "peak": max(self._idle, self._peak())}

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
