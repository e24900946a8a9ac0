"""The modules of one stage, and how they run.

Everything between two layers is the same whether or not the model is cut there: every layer draws
from its own random stream, and tensors and gradients that pass from layer to layer are contiguous
and aligned, as they are after a journey between hosts. So the bits of a run do not depend on the
balance.

Autocast is entered for the call of one layer at a time, and for the loss. torch keeps a
low-precision copy of each weight as long as an autocast region lasts, so that a weight that is used
twice is cast once and its two gradients are summed in low precision. That cache stays on, as in an
ordinary loop. Because no region is longer than a layer, whose parameters no other layer has, the
cache never depends on where the model is cut, nothing in it outlives a micro-batch or an optimizer
step, and a recomputed layer finds it as empty as the first forward did.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.checkpoint.stage_state import require_storable
from rpcmp.config import files
from rpcmp.config.types import Autocast
from rpcmp.errors import ConfigError
from rpcmp.pipelining import devices, microbatches, pytree, random_streams
from rpcmp.pipelining.assignment import Assignment
from rpcmp.process import compiler
from rpcmp.rpc.messages import Evaluated, LossWeight, MicrobatchMeta
from rpcmp.rpc.tensors import checksum
from rpcmp.splitting.layer import SplitLayer
from rpcmp.worker import compiling
from rpcmp.worker.building import build
from rpcmp.worker.checks.second_forward import TrialState
from rpcmp.worker.loss import LOSS, SinkLoss
from rpcmp.worker.state.forward_state import (
    ChangedAttributes,
    ForwardState,
    ParameterWatch,
    StateCopy,
    not_renormalized,
)
from rpcmp.worker.state.places import Stateful, hidden_parameters, parts_of
from rpcmp.worker.state.variables_watch import VariablesWatch

log = logging.getLogger(__name__)

HOST = "host"
"""The signature's entry for the name of the host. Everything else in it has a longer name."""

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

ALIGNMENT = 64
"""Bytes; that of new tensors from torch's allocator. Kernels choose their code by it."""


@dataclass
class LossScale:
    """The gradient of the loss, from which the sink's backwards start; changes between two steps.

    To start from the scale instead of one leaves the loss as it is reported.
    """

    value: float = 1.0

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of the scaled loss by `loss`, a scalar."""
        return torch.full_like(loss, self.value, dtype=torch.float32).to(loss.dtype)


class StageModel:
    """One stage's layers, and for the sink the loss and the metrics.

    Args:
        loads: whether to load the weights of `init`.

    Attributes:
        foreign: names of parameters that another one is tied to, which alone is stored and trained.
        base: checksums of the frozen weights that only `init` has, by layer.
        returns_outputs: whether the driver computes metrics from the outputs.
    """

    def __init__(self, assignment: Assignment, loads: bool = True) -> None:
        config = assignment.config
        settings = config.stage(assignment.stage_index)
        self._seed = config.seed
        self._named = config.modules
        self._loaded_elsewhere = _modules_of_data(assignment)
        self._training: bool | None = None
        self.is_sink = config.graph().sink == assignment.stage_name
        self.device = devices.working_device(assignment.device or settings.device)
        dtype = config.autocast_of(assignment.stage_index)
        self._autocast = _autocast(self.device, dtype)
        self.compiles = config.compiles(assignment.stage_index)
        if self.compiles:
            compiler.prepare()
        self._modules, shared = build(config, assignment.stage_index, assignment.layers, loads)
        self._prefixes = {layer: config.prefix_of(layer) for layer in self._modules}
        self._stored = dict(self._modules)
        own = {name for layer in self._modules for name, _ in self._named_in(layer)}
        self.foreign = own & set(config.tied_to)
        self._elsewhere = self.foreign | (own & config.base)  # what this stage does not store
        self.base = self._checksums(config.base)
        for module in self._modules.values():
            module.to(self.device)
            if settings.frozen:
                module.requires_grad_(False)
        self._calls: dict[str, Callable[..., Any]] = dict(self._modules)
        if self.compiles:
            self._calls = {n: compiling.compiled(layer) for n, layer in self._modules.items()}
        self.returns_outputs = self.is_sink and bool(assignment.driver_metrics)
        self._loss: SinkLoss | None = None
        if self.is_sink:
            *_, last = self._modules.values()
            self._loss = SinkLoss(
                config,
                self.device,
                self._autocast,
                assignment.driver_metrics,
                last.as_returned if isinstance(last, SplitLayer) else None,
            )
            self._store(self._loss.module)
        self._state = self.forward_state(renormalized=True)
        self._before_evaluation: list[StateCopy] = []
        stateful = self._stateful()
        self.attributes = ChangedAttributes(stateful.modules, self.device, stateful.objects)
        self.variables = VariablesWatch(*stateful, shared) if config.num_stages > 1 else None
        self._base_names = config.base - self.foreign
        self._base_watch: ParameterWatch | None = None
        self.hidden = hidden_parameters(parts_of(stateful.modules), stateful.objects)
        self._evaluation_watch: ParameterWatch | None = None
        if config.takes_snapshots:
            self._require_storable()

    def _require_storable(self) -> None:
        """Refuse what no snapshot could hold before the first step, and not at its end."""
        try:
            for name, value in self.named_state().items():
                require_storable(name, value)
        except TypeError as error:
            raise ConfigError(
                f"{error}: so no snapshot of this stage can be taken; use another dtype or layout, "
                "or set recovery.enabled = false, without a [checkpoint] section"
            ) from error

    def _store(self, loss: nn.Module | None) -> None:
        """Let a loss's parameters and buffers be the stage's, as those of a layer."""
        if loss is None:
            return
        names = {name for layer in self._modules for name, _ in self._named_in(layer)}
        if LOSS in self._modules or any(name.startswith(f"{LOSS}.") for name in names):
            raise ConfigError(
                "the loss has parameters or buffers, which are stored as 'loss.*', and so are some "
                "of the model: give those another name"
            )
        self._stored[LOSS], self._prefixes[LOSS] = loss, f"{LOSS}."
        frozen = [name for name, each in loss.named_parameters() if not each.requires_grad]
        # Weights of classes and the like are the config's, and no result of training.
        fixed = dict(loss.named_buffers()) if type(loss).__module__.startswith("torch.") else ()
        self._elsewhere |= {f"{LOSS}.{name}" for name in (*frozen, *fixed)}
        if trained := [name for name, each in loss.named_parameters() if each.requires_grad]:
            log.info("the loss is trained as well: %s", ", ".join(trained))

    def stateful(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that are stored, each with the prefix of its names."""
        return [(self._prefixes[layer], module) for layer, module in self._stored.items()]

    def forward_state(self, renormalized: bool = False) -> ForwardState:
        """Return all that a forward, or the loss, may change besides parameters."""
        return ForwardState(*self._stateful(), renormalized=renormalized)

    def _stateful(self) -> Stateful:
        modules = [(self._prefixes[layer], module) for layer, module in self._modules.items()]
        if self._loss is None:
            return Stateful(modules)
        loss = self._loss.state
        return Stateful([*modules, *loss.modules], loss.objects)

    def put_back(self) -> None:
        """Undo what an evaluation has changed, before anything reads or trains the stage."""
        if self._training is not False:
            return
        self._state.put_back(self._before_evaluation)
        changed = "" if self._evaluation_watch is None else self._evaluation_watch.changed()
        self._before_evaluation, self._evaluation_watch = [], None
        self._switch(training=True)
        if changed:
            raise ConfigError(
                f"an evaluation changes the parameter {changed!r}, so a run with evaluations would "
                "train something else than one without: change it in training only"
            )

    def require_unchanged_base(self) -> None:
        """Check that no forward has changed weights that no snapshot has: frozen or hidden ones.

        Raises:
            ConfigError: it has, and neither a snapshot nor a checkpoint would have them.
        """
        if self._base_watch is not None and (changed := self._base_watch.changed()):
            if changed in self.hidden:
                raise ConfigError(
                    f"the forward changes {changed!r}, a parameter of a module that is none of "
                    "torch's submodules, so no snapshot and no checkpoint has it: let the layer "
                    "have it as an attribute, with requires_grad_(False)"
                )
            raise ConfigError(
                f"the forward changes {changed!r}, which is frozen and part of what "
                "rpcmp.from_init builds: no snapshot and no checkpoint has it; build what changes "
                "outside of from_init"
            )

    def _watch_base(self) -> ParameterWatch:
        named = self.named_parameters()
        base = {name: each for name, each in named if name in self._base_names}
        return ParameterWatch(base | self.hidden)

    def watch(self) -> ParameterWatch:
        """Watch the parameters and hidden ones; see `not_renormalized`."""
        named = [*self.named_parameters(), *self.hidden.items()]
        return ParameterWatch(not_renormalized(named, self.modules()))

    def trial_state(self) -> TrialState | None:
        """Return what a forward may change, with parameters; None: there is no memory for copies.

        No copies are made of what `require_unchanged_base` watches.
        """
        named = [each for each in self.named_parameters() if each[0] not in self._base_names]
        parameters = not_renormalized([*named, *self.hidden.items()], self.modules())
        size = sum(each.numel() * each.element_size() for each in parameters.values())
        free = devices.available_bytes(self.device)
        if free is not None and 2 * size > free:
            log.warning(
                "what forwards keep cannot be tried: there is no memory for copies of the "
                "parameters, %d MiB",
                size >> 20,
            )
            return None
        return TrialState(self.forward_state(), parameters)

    def forward(self, inputs: list[Any], meta: MicrobatchMeta, eagerly: bool = False) -> Any:
        header = meta.round
        self.set_mode(header.is_training)
        for index, (name, call) in enumerate((self._modules if eagerly else self._calls).items()):
            random_streams.seed_all(self._seed, header.mode.value, header.step, meta.draw, name)
            with self._autocast:
                inputs = [self._call(name, call, inputs)]  # stage.py [7]
            if index + 1 < len(self._modules):
                inputs = [pytree.map_tensors(_seam, inputs[0])]
        return inputs[0]

    def _call(self, name: str, call: Callable[..., Any], inputs: list[Any]) -> Any:
        if not self.compiles:
            return call(*inputs)
        try:
            return call(*inputs)
        except Exception as error:
            raise compiling.explain(name, error) from error

    def set_mode(self, training: bool) -> None:
        """Call `train` whenever the mode changes, as a plain training loop does.

        What modules do in `train`, such as to merge weights, is no change of an evaluation.
        """
        if training is self._training:
            return
        if training:
            self.put_back()
            self._switch(training)
            self._base_watch = self._base_watch or self._watch_base()
        else:
            self._switch(training)
            self._before_evaluation = self._state.copy()
            self._evaluation_watch = self.watch()

    def _switch(self, training: bool) -> None:
        if training is not self._training:
            self._training = training
            for module in self._modules.values():
                module.train(training)
            if self._loss is not None:
                self._loss.set_mode(training)

    def loss(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None = None
    ) -> Tensor:
        """Return the micro-batch's part of the mini-batch's loss, a scalar; see `SinkLoss`."""
        return self._its_loss.train(outputs, targets, meta, weight)

    def prove_objective(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None
    ) -> None:
        """Check in the first rounds that the objective is the mini-batch's; see `SinkLoss`."""
        self._its_loss.prove(outputs, targets, meta, weight)

    def evaluate(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None = None
    ) -> Evaluated:
        return self._its_loss.evaluate(outputs, targets, meta, weight)

    @property
    def _its_loss(self) -> SinkLoss:
        if self._loss is None:
            raise RuntimeError("only the sink has a loss")
        return self._loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in the unsplit model; shared ones once."""
        seen: set[nn.Parameter] = set()
        for layer in self._stored:
            for name, parameter in self._named_in(layer):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def _named_in(self, layer: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._stored[layer].named_parameters():
            yield self._prefixes[layer] + name, parameter

    def _checksums(self, base: Collection[str]) -> dict[str, str]:
        of_layers = {
            layer: {name: value for name, value in self._named_in(layer) if name in base}
            for layer in self._modules
        }
        return {layer: checksum(named) for layer, named in of_layers.items() if named}

    @property
    def is_cut(self) -> bool:
        """Whether all layers are parts of a module that was cut."""
        return all(isinstance(each, SplitLayer) for each in self._modules.values())

    def modules(self) -> Iterator[nn.Module]:
        for layer in self._stored.values():
            yield from layer.modules()

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers by their names in the unsplit model, not copied."""
        self.put_back()
        return self.named_state()

    def named_state(self) -> dict[str, Tensor]:
        """Return what `state_dict` does, as an evaluation has left it; from any thread."""
        return {
            whole: value
            for layer, module in self._stored.items()
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
            and (whole := self._prefixes[layer] + name) not in self._elsewhere
        }

    def smallest_microbatch(self) -> int:
        """Return the number of samples that this stage needs in a micro-batch to train."""
        self.set_mode(training=True)
        return microbatches.smallest_for(self._modules.values())

    def signature(self) -> dict[str, str]:
        """Describe each parameter and buffer, the code that computes with them, and the host."""
        described = {
            name: f"{value.dtype} of shape {tuple(value.shape)}"
            for name, value in [*self.named_state().items(), *self.named_parameters()]
        }
        for name, value in self.named_parameters():
            described[name] += ", trained" if value.requires_grad else ", frozen"
        base = {f"`init` for layer {layer!r}": checksum for layer, checksum in self.base.items()}
        return {HOST: platform.node(), **described, **base, **self._code}

    @cached_property
    def _code(self) -> dict[str, str]:
        """The user's code, read when all is built: later imports depend on what was computed."""
        # Other modules that the job names, such as a metric's of the driver, need not be installed.
        imported = {name for name in self._named if name in sys.modules}
        return files.code_versions(imported | self._loaded_elsewhere)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load this stage's parameters and buffers, by their names in the unsplit model."""
        self.put_back()
        for layer, module in self._stored.items():
            prefix = self._prefixes[layer]
            new = {  # tied parameters of another owner stay, and those that `init` has
                name: value if prefix + name in self._elsewhere else state.get(prefix + name)
                for name, value in module.state_dict().items()
            }
            try:
                known = {n: value for n, value in new.items() if value is not None}
                module.load_state_dict(known, strict=layer != LOSS)  # former files lack it
            except RuntimeError as error:
                raise ConfigError(f"layer {layer!r}: {error}") from error


def _modules_of_data(assignment: Assignment) -> set[str]:
    config = assignment.config
    if config.data is None or not assignment.loads_data:
        return set()
    if not config.graph().parts(assignment.stage_name):
        return set()
    own = (config.data.sampler, config.data.collate)
    sources = [*config.data.factories.values(), *(each for each in own if each is not None)]
    return {source.callable.partition(":")[0] for source in sources}


def _seam(tensor: Tensor) -> Tensor:
    """`tensor` as it would arrive at another stage. Its gradient will be, too."""
    tensor = _aligned(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        # None: one of several results of an operation, which nobody has read.
        tensor.register_hook(lambda gradient: None if gradient is None else _aligned(gradient))
    return tensor


def _aligned(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _autocast(device: torch.device, dtype: Autocast | None) -> AbstractContextManager[object]:
    """The context of a layer's forward, which may be entered again and again, but not nested."""
    if dtype is None:
        return contextlib.nullcontext()
    try:
        return torch.autocast(device.type, AUTOCAST_DTYPES[dtype])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"autocast = {dtype!r} is not available on {device}: {reason}") from error
