"""Loss scaling, replicas and tied parameters in one process, for the reference of `rpcmp verify`.

Mixed precision is as in a plain loop: `torch.autocast`, and `torch.amp.GradScaler` itself.
GradScaler skips the step of an optimizer whose gradients are not finite. Here is one optimizer per
stage, and none may step if any must not, so GradScaler sees all of them as one.

A stage's replicas are the same modules with gradients and buffers for each replica. Bundles of
micro-batches go to replicas by `rpcmp.config.topology`, and each replica adds up the gradients of
its own. Before the step the replicas' sums are added in their order, and all replicas take the
buffers of replica 0.

Of a parameter that lies in several layers, each layer has a tensor of its own, as if the layers
were on several hosts. Before the step the gradients are added to the first tensor's, in the order
of the config's names; after it all tensors take the first one's value. Only the first is optimized
and stored.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.compiler import config as compiler_config

from rpcmp.config.schema import Config
from rpcmp.config.topology import ReplicaAssignment
from rpcmp.pipelining import random_streams
from rpcmp.splitting.layer import SplitLayer


def compiled_call(layer: Any) -> Callable[..., Any]:
    """Return the call of a layer by compiled code, with the options that a stage uses."""
    compiler_config.recompile_limit = 64  # a stage's as well; torch's own limit is 8
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # not in torch 2.12
        options |= {"isolate_recompiles": True, "recompile_limit": 64}
    if isinstance(layer, SplitLayer):
        layer.compile_programs(lambda run: torch.compile(run, **options))
        return layer

    def call(*inputs: Any) -> Any:
        return layer(*inputs)

    # As many code objects as layers: torch limits how often each is compiled.
    call.__code__ = call.__code__.replace(co_name=f"call_{id(layer)}")
    compiled: Callable[..., Any] = torch.compile(call, **options)
    return compiled


def autocast(config: Config, stage_index: int) -> AbstractContextManager[object]:
    """Return the context for one call of a layer of a stage."""
    dtype = config.autocast_of(stage_index)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype))


class ReferenceSteps:
    """The end of a mini-batch: unscale, clip and step as the config says."""

    def __init__(self, config: Config, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._max_norm = config.max_grad_norm
        self._optimizer = _CombinedOptimizer(config.seed, optimizers) if optimizers else None
        options: dict[str, Any] = {}
        if (scaling := config.loss_scaling) is not None:
            options = {
                "init_scale": scaling.initial,
                "growth_factor": scaling.growth_factor,
                "backoff_factor": scaling.backoff_factor,
                "growth_interval": scaling.growth_interval,
            }
        # One that is not enabled passes the loss and the step on.
        self._scaler: Any = GradScaler("cpu", enabled=scaling is not None, **options)

    def scale(self, loss: Tensor) -> Tensor:
        """Return what to differentiate instead of `loss`."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, parameters: Iterable[nn.Parameter], number: int) -> bool:
        """Step all optimizers, and return whether they did; `number` counts steps from 1."""
        parameters = list(parameters)
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if has_gradients:
            self._scaler.unscale_(self._optimizer)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        if self._optimizer is None:
            return True
        before, self._optimizer.number = self._optimizer.steps, number
        if has_gradients:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        return self._optimizer.steps > before


class _CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one."""

    def __init__(self, seed: int, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._seed = seed
        self._optimizers = optimizers
        self.number = 1
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for stage, optimizer in self._optimizers.items():
            random_streams.seed_all(self._seed, "optimizer", self.number, stage)
            optimizer.step()
        self.steps += 1


class Replicas:
    """The replicas of one stage."""

    def __init__(self, modules: Iterable[nn.Module], assignment: ReplicaAssignment) -> None:
        self._modules = list(modules)
        self._assignment = assignment
        self._parameters = list(
            dict.fromkeys(p for module in self._modules for p in module.parameters())
        )
        self._gradients = self._no_gradients()
        self._buffers = [self._copy_buffers() for _ in range(assignment.num_replicas)]

    def enter(self, bundle: int) -> None:
        """Load the gradients and buffers of the replica that computes this bundle."""
        self._load(self._assignment.owner(bundle))

    def leave(self, bundle: int) -> None:
        """Store the gradients and buffers of the replica that computed this bundle."""
        replica = self._assignment.owner(bundle)
        self._gradients[replica] = [parameter.grad for parameter in self._parameters]
        self._buffers[replica] = self._copy_buffers()

    def sum(self) -> None:
        """Load the sum of all replicas' gradients, and give all the buffers of the first."""
        self._load(0)
        for index, parameter in enumerate(self._parameters):
            total: Tensor | None = None
            for gradients in self._gradients:
                part = gradients[index]
                if part is not None:
                    total = part if total is None else total + part
            parameter.grad = total
        self._gradients = self._no_gradients()
        self._buffers = [self._copy_buffers() for _ in self._buffers]

    def _no_gradients(self) -> list[list[Tensor | None]]:
        return [[None] * len(self._parameters)] * self._assignment.num_replicas

    def _load(self, replica: int) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients[replica], strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(self._all_buffers(), self._buffers[replica], strict=True):
                buffer.copy_(value)

    def _copy_buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._all_buffers()]

    def _all_buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers()]


class ReferenceTies:
    """The tied parameters of a model.

    Args:
        parameters: all parameters, by their names in the unsplit model.
    """

    def __init__(
        self, tied: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._groups = [[parameters[name] for name in names] for names in tied]
        self.copy_values()

    def sum(self) -> None:
        """Add the gradients of each group to its first parameter's."""
        for first, *others in self._groups:
            for other in others:
                if other.grad is not None:
                    first.grad = other.grad if first.grad is None else first.grad + other.grad
                other.grad = None

    def copy_values(self) -> None:
        """Copy the value of each group's first parameter to the others."""
        with torch.no_grad():
            for first, *others in self._groups:
                for other in others:
                    other.copy_(first)
