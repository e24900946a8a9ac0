"""The optimizers of all stages as one.

What concerns the whole model, the gradient norm, is put together from the norm of every parameter,
in the order of the unsplit model: the same bits for every balance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.driver.loss_scaler import LossScaler, ScalerState
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import JobError, RpcmpError
from rpcmp.rpc.messages import StepReport
from rpcmp.worker.optimizer import StageOptimizer


class DistributedOptimizer:
    """The optimizers of all stages as one; lives on the driver.

    Args:
        optimizers: the StageOptimizers, in the order of the unsplit model's parameters.
        sum_gradients: has replicas sum their gradients, where they have not done so yet.
        abort: frees all that wait for a stage that has failed; returns the cause of that error.
        scaler: of the loss; None: gradients are those of the loss itself.

    Attributes:
        scaler: as given.
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

    def step(self) -> dict[str, StepReport]:
        """Update the parameters of all stages and clear their gradients.

        Where the loss is scaled and a gradient is not finite, none of them updates anything.

        Raises:
            StageError: an optimizer raised; no other stage waits for it any more.
        """
        with self._together():
            self._sum_gradients()
            updates = self._unscale()
            reports = self._everywhere(StageOptimizer.step, updates)
        if (scale := self._update_scale(updates)) is not None:
            self._everywhere(StageOptimizer.set_scale, scale)
        return reports

    def finish(self, max_norm: float | None, loss: float | None) -> dict[str, StepReport]:
        """End a round that all stages hold: unscale, clip, step, let the schedulers step.

        Args:
            max_norm: the largest norm of the whole model's gradient; None: as it is.
            loss: what the schedulers get; None where they do not step now.
        """
        updates = self._unscale()
        factor = None
        if max_norm is not None and updates:
            factor = self._clip_factor(self._norm(2.0), max_norm)
        scale = self._update_scale(updates)
        return self._everywhere(StageOptimizer.finish, factor, loss, updates, scale)

    def zero_grad(self) -> None:
        """Clear the gradients of all stages."""
        self._are_finite = None
        self._everywhere(StageOptimizer.zero_grad)

    def require_scaled(self) -> None:
        """Check that gradients may still be added to those that the stages have.

        Raises:
            JobError: those are unscaled already, and more would come scaled.
        """
        if self._are_finite is not None:
            raise JobError(
                "gradients that have been clipped are unscaled, and more of them would come "
                "scaled: step first, or clip after the last of them; all have been cleared"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that the norm over the whole model is at most `max_norm`.

        The arithmetic is that of `torch.nn.utils.clip_grad_norm_` on the unsplit model.

        Returns:
            The norm before scaling, a float32 scalar.
        """
        with self._together():
            self._sum_gradients()
        self._unscale()
        total = self._norm(norm_type)
        self._everywhere(StageOptimizer.scale, self._clip_factor(total, max_norm))
        return total

    def step_scheduler(self, loss: float) -> None:
        """Let every stage's learning-rate scheduler step."""
        self._everywhere(StageOptimizer.step_scheduler, loss)

    def load_scaler(self, state: ScalerState) -> None:
        """Scale as a scaler would that was in `state`; nothing where the loss is not scaled."""
        if self.scaler is not None:
            self.scaler.state = state
            self._everywhere(StageOptimizer.set_scale, state.scale)

    def state_dict(self) -> dict[str, Any]:
        """The state of all stages: "state" by parameter name, the scaler's, the rest by stage."""
        merged: dict[str, Any] = {"state": {}, "param_groups": {}, "scheduler": {}, "aside": {}}
        for part in self._optimizers.on_firsts(StageOptimizer.state_dict).values():
            for key, value in part.items():
                merged[key].update(value)
        if self.scaler is not None:
            merged["scaler"] = asdict(self.scaler.state)
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; each stage finds its own by name."""
        self._everywhere(StageOptimizer.load_state_dict, state)
        if "scaler" in state:
            self.load_scaler(ScalerState(**state["scaler"]))

    def release(self) -> None:
        """Let go of the stages' optimizers; nothing else may be called afterwards."""
        self._optimizers.release()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What stages do within the block they may wait for each other in."""
        try:
            yield
        except RpcmpError as error:
            raise self._abort(error) from error

    def _unscale(self) -> bool:
        """Unscale all gradients, once before a step; whether that may be done."""
        if self.scaler is None:
            return True
        if self._are_finite is None:
            found = self._everywhere(StageOptimizer.unscale, self.scaler.inverse)
            self._are_finite = all(found.values())
        return self._are_finite

    def _update_scale(self, are_finite: bool) -> float | None:
        """The next step's scale; None where there is none."""
        self._are_finite = None
        if self.scaler is None:
            return None
        self.scaler.update(are_finite)
        return self.scaler.state.scale

    def _norm(self, norm_type: float) -> Tensor:
        found = self._optimizers.on_firsts(StageOptimizer.norms, norm_type)
        norms = [norm for of_stage in found.values() for norm in of_stage.values()]
        if not norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    @staticmethod
    def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def _everywhere(self, method: Callable[..., Future[Any]], *args: Any) -> dict[str, Any]:
        return self._optimizers.everywhere(method, *args)
