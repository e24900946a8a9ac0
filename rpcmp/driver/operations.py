"""The operations that a program can call on its job, and how the driver process serves them.

    rpcmp.job.pipeline.Pipeline ──(version, name, arguments)──> serve ──> Operations ──> StageGroup

`Operations` is the one table of them: the public methods of a pipeline and its optimizer pass
`Operations.train_step` and the like to `Pipeline._call`, which takes arguments and result types
from there, and nothing else can be called by name.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.data.batches import Loaded
from rpcmp.driver.evaluation import Metrics
from rpcmp.driver.loss_scaler import ScalerState
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError, JobError, LossScaleError, RpcmpError, one_line, to_wire
from rpcmp.process.activity import PHASE_BYTES, Activity
from rpcmp.rpc.messages import AfterRound
from rpcmp.rpc.tensors import Handoff
from rpcmp.worker.stage import Stage

OPTIMIZER_STATE = ("step", "state", "param_groups", "scheduler")
"""The keys that every optimizer state has; a job may add others."""


class Effect(Enum):
    """The effect of a call on the job, which decides what recovery does with the call."""

    READS = "reads"
    """Model, gradients and optimizers stay as they are; never repeated."""

    CHANGES = "changes"
    """They change; repeated for a group that has not seen the call. A call that fails changes
    nothing."""

    DIFFERENTIATES = "differentiates"
    """As CHANGES, but a call that fails clears all gradients."""


class Operation(NamedTuple):
    """A method of Operations whose arguments and result `rpcmp.rpc.tensors` can carry."""

    method: Callable[..., Any]
    effect: Effect


OPERATIONS: dict[str, Operation] = {}
"""The operations by name."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _operation(effect: Effect) -> Callable[[Method], Method]:
    def register(method: Method) -> Method:
        OPERATIONS[method.__name__] = Operation(method, effect)
        return method

    return register


class Operations:
    """The operations on one group.

    The caller numbers calls that change the model. After some of them, but never while there are
    gradients, all stages keep their state under the call's number, so that a later group can start
    from there.

    Args:
        state: `state` at the call that the group starts after.
        kept: the number of that call.
        metrics: those that the driver computes.

    Attributes:
        step: optimizer steps that the group has done.
        version: the number of the call that is being answered; 0: it changes nothing.
        kept: the newest number under which all stages have kept their state.
    """

    def __init__(
        self,
        config: Config,
        group: StageGroup,
        state: Mapping[str, Any] = MappingProxyType({}),
        kept: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._group = group
        self._metrics = metrics or Metrics({})
        self._has_gradients = False
        self.step: int = state.get("step", 0)
        self.version = 0
        self.kept = kept
        if state.get("scaler") is not None:
            group.optimizer.load_scaler(ScalerState(**state["scaler"]))

    @property
    def state(self) -> dict[str, Any]:
        """The driver's own state, as plain values."""
        scaler = self._group.optimizer.scaler
        return {"step": self.step, "scaler": None if scaler is None else asdict(scaler.state)}

    @_operation(Effect.DIFFERENTIATES)
    def train_step(self, inputs: Any, targets: Any) -> float:
        """Do one optimizer step; returns the mean loss."""
        self._require_scaled()
        # Held, so that no stage has stepped if the backward of any of them fails.
        version = self.version if self._is_due() else 0
        batch = Loaded(inputs, targets)
        started = self._group.start_step(batch, self.step + 1, AfterRound.HOLD, version)
        loss = self._group.finish_step(started).loss
        try:
            self._group.end_step(started, loss)
        except LossScaleError:  # the stages have counted the step, and kept their state
            self._count_step(version)
            raise
        self._count_step(version)
        return loss

    @_operation(Effect.DIFFERENTIATES)
    def forward_backward(self, inputs: Any, targets: Any) -> float:
        """Accumulate gradients; returns the mean loss."""
        self._require_scaled()
        self._has_gradients = True
        batch = Loaded(inputs, targets)
        started = self._group.start_step(batch, self.step + 1, AfterRound.NOTHING)
        return self._group.finish_step(started).loss

    @_operation(Effect.READS)
    def evaluate(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """Return the fields of an Evaluation: number of samples, loss and metrics."""
        self._metrics.reset()
        evaluation = self._group.evaluate(Loaded(inputs, targets), self.step, self._metrics)
        metrics = {**evaluation.metrics, **self._metrics.compute()}
        return asdict(evaluation) | {"metrics": metrics}

    @_operation(Effect.READS)
    def predict(self, inputs: Any) -> Any:
        return self._group.predict(inputs, self.step)

    @_operation(Effect.READS)
    def state_dict(self) -> dict[str, Tensor]:
        return self._group.workers.merge(Stage.state_dict)

    @_operation(Effect.CHANGES)
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._group.load_state_dict(state)
        self._keep()

    @_operation(Effect.READS)
    def parameters_sha256(self) -> str:
        return self._group.parameters_sha256()

    @_operation(Effect.READS)
    def live_state(self) -> dict[str, dict[str, int]]:
        """Return counts of what a step must not leave behind, by stage."""
        return self._group.live_state()

    @_operation(Effect.CHANGES)
    def optimizer_step(self) -> bool:
        """Update the parameters and clear the gradients; returns False if the step was skipped."""
        skipped = self.scaler_state()["skipped"]
        self._group.step()
        self.step += 1
        self._has_gradients = False
        self._keep()
        return bool(self.scaler_state()["skipped"] == skipped)

    @_operation(Effect.READS)
    def scaler_state(self) -> dict[str, Any]:
        """Return the loss scaler's state; without a scaler, as if its scale were 1."""
        scaler = self._group.optimizer.scaler
        return asdict(ScalerState(1.0) if scaler is None else scaler.state)

    @_operation(Effect.CHANGES)
    def zero_grad(self) -> None:
        self._group.zero_grad()
        self._has_gradients = False

    @_operation(Effect.CHANGES)
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Clip the gradients; returns their norm before."""
        return float(self._group.optimizer.clip_grad_norm_(max_norm, norm_type))

    @_operation(Effect.CHANGES)
    def step_scheduler(self, loss: float) -> None:
        self._group.optimizer.step_scheduler(loss)
        self._keep()

    @_operation(Effect.READS)
    def optimizer_state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self._group.optimizer.state_dict()}

    @_operation(Effect.CHANGES)
    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `optimizer_state_dict`."""
        if missing := [key for key in OPTIMIZER_STATE if key not in state]:
            raise ConfigError(
                f"this is no state of a pipeline's optimizer: it has no {', '.join(missing)}; load "
                "what pipeline.optimizer.state_dict() returned"
            )
        self._group.optimizer.load_state_dict(state)
        self.step = state["step"]
        self._keep()

    def _count_step(self, version: int) -> None:
        self.step += 1
        self._has_gradients = False
        self.kept = version or self.kept

    def _require_scaled(self) -> None:
        """Refuse to mix scaled and unscaled gradients, or to compute some that cannot be finite.

        Gradients that there are already are cleared, as after any other failure to differentiate.
        """
        optimizer = self._group.optimizer
        try:
            optimizer.require_scaled()
            if optimizer.scaler is not None:
                optimizer.scaler.require_useful(self.step)
        except JobError:
            self.zero_grad()
            raise

    def _is_due(self) -> bool:
        every = self._config.snapshot_every_steps
        return every > 0 and self.version - self.kept >= every

    def _keep(self) -> None:
        if self._is_due() and not self._has_gradients:
            self._group.workers.everywhere(Stage.keep, self.version)
            self.kept = self.version


def serve(operations: Operations, fd: int, activity: Activity) -> None:
    """Answer calls until the caller closes its end of the socket pair; `fd` is the other."""
    handoff = Handoff(socket.socket(fileno=fd))
    while True:
        try:
            operations.version, name, *arguments = handoff.receive()
        except EOFError:
            return
        with activity.during(name[:PHASE_BYTES], operations.step + 1):
            answer = answer_call(operations, name, arguments)
        try:
            handoff.send(answer)
        except TypeError as error:  # the model's outputs contain a value that is not a tensor
            handoff.send({"error": to_wire(JobError(f"{name}: {error}"))})


def answer_call(operations: Operations, name: str, arguments: list[Any]) -> dict[str, Any]:
    """Run an operation; returns its result or its error, in a form that can be sent."""
    try:
        result = OPERATIONS[name].method(operations, *arguments)
        return {"result": result, "state": operations.state, "kept": operations.kept}
    except LossScaleError as error:  # not a failure: the call has been counted
        return {"error": to_wire(error), "state": operations.state, "kept": operations.kept}
    except RpcmpError as error:
        return {"error": to_wire(error)}
    except Exception as error:
        return {"error": to_wire(JobError(f"{name} failed: {one_line(error)}"))}
