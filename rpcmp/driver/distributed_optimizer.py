"""The optimizers of all stages as one.

The gradient norm of the whole model is computed from the norm of every parameter, in the order of
the unsplit model: the same bits for every balance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rpcmp.driver.loss_scaler import LossScaler, ScalerState
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import JobError, RpcmpError
from rpcmp.rpc.messages import StepReport
from rpcmp.worker.optimizer import StageOptimizer


class DistributedOptimizer:
    """The driver's handle for the optimizers of all stages.

    Args:
        optimizers: the StageOptimizers, in the order of the unsplit model's parameters.
        sum_gradients: makes replicas sum their gradients, unless they have done so already.
        abort: releases all stages that wait for a failed one; returns the cause of the error.
        scaler: the loss scaler; None: the loss is not scaled.
    """

    def __init__(
        self,
        optimizers: WorkerRefs,
        sum_gradients: Callable[[], None],
        abort: Callable[[RpcmpError], RpcmpError],
        scaler: LossScaler | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._sum_gradients = sum_gradients
        self._abort = abort
        self.scaler = scaler
        self._are_finite: bool | None = None

    def step(self) -> None:
        """Update the parameters of all stages and clear their gradients.

        If the loss is scaled and a gradient is not finite, no stage updates anything.
        """
        with self._abort_on_error():
            self._sum_gradients()
            updates = self._unscale()
            self._optimizers.everywhere(StageOptimizer.step, updates)
        if (scale := self._update_scale(updates)) is not None:
            self._optimizers.everywhere(StageOptimizer.set_scale, scale)

    def finish(self, max_norm: float | None, loss: float | None) -> dict[str, StepReport]:
        """Finish a round that all stages hold: unscale, clip, step, and step the schedulers.

        Args:
            max_norm: the largest norm of the whole model's gradient; None: no clipping.
            loss: the loss for the schedulers; None: they do not step now.
        """
        updates = self._unscale()
        factor = None
        if max_norm is not None and updates:
            factor = _clip_factor(self._norm(2.0), max_norm)
        scale = self._update_scale(updates)
        return self._optimizers.everywhere(StageOptimizer.finish, factor, loss, updates, scale)

    def zero_grad(self) -> None:
        self._are_finite = None
        self._optimizers.everywhere(StageOptimizer.zero_grad)

    def require_scaled(self) -> None:
        """Raise JobError if the stages' gradients are unscaled, so that none may be added."""
        if self._are_finite is not None:
            raise JobError(
                "gradients that have been clipped are unscaled, and more of them would come "
                "scaled: step first, or clip after the last of them; all have been cleared"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that the norm over the whole model is at most `max_norm`.

        The arithmetic equals `torch.nn.utils.clip_grad_norm_` on the unsplit model.

        Returns:
            The norm before scaling, a float32 scalar.
        """
        with self._abort_on_error():
            self._sum_gradients()
        self._unscale()
        total = self._norm(norm_type)
        self._optimizers.everywhere(StageOptimizer.scale, _clip_factor(total, max_norm))
        return total

    def step_scheduler(self, loss: float) -> None:
        self._optimizers.everywhere(StageOptimizer.step_scheduler, loss)

    def load_scaler(self, state: ScalerState) -> None:
        """Set the scaler's state at the driver and the stages; ignored without loss scaling."""
        if self.scaler is not None:
            self.scaler.state = state
            self._optimizers.everywhere(StageOptimizer.set_scale, state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: "state" by parameter name, "scaler", everything else by stage."""
        merged: dict[str, Any] = {"state": {}, "param_groups": {}, "scheduler": {}, "aside": {}}
        for part in self._optimizers.on_firsts(StageOptimizer.state_dict).values():
            for key, value in part.items():
                merged[key].update(value)
        if self.scaler is not None:
            merged["scaler"] = asdict(self.scaler.state)
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`; each stage finds its own part by name."""
        self._optimizers.everywhere(StageOptimizer.load_state_dict, state)
        if "scaler" in state:
            self.load_scaler(ScalerState(**state["scaler"]))

    def release(self) -> None:
        self._optimizers.release()

    @contextlib.contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """If the block raises, release the stages that wait for each other in it."""
        try:
            yield
        except RpcmpError as error:
            raise self._abort(error) from error

    def _unscale(self) -> bool:
        """Unscale all gradients, once before a step; return whether the step may be done."""
        if self.scaler is None:
            return True
        if self._are_finite is None:
            are_finite = self._optimizers.everywhere(StageOptimizer.unscale, self.scaler.inverse)
            self._are_finite = all(are_finite.values())
        return self._are_finite

    def _update_scale(self, are_finite: bool) -> float | None:
        """Update the scaler; return the next step's scale, or None without loss scaling."""
        self._are_finite = None
        if self.scaler is None:
            return None
        self.scaler.update(are_finite)
        return self.scaler.state.scale

    def _norm(self, norm_type: float) -> Tensor:
        by_stage = self._optimizers.on_firsts(StageOptimizer.norms, norm_type)
        norms = [norm for by_name in by_stage.values() for norm in by_name.values()]
        if not norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
