"""What a user's program can ask of its driver process; rpcmp.job.pipeline is the other end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.data.batches import Loaded
from rpcmp.driver.loss_scaler import ScalerState
from rpcmp.driver.metrics import Metrics
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError, JobError, LossScaleError, RpcmpError, one_line, to_wire
from rpcmp.process.activity import PHASE_BYTES, Activity
from rpcmp.rpc.messages import AfterRound
from rpcmp.rpc.tensors import Handoff

OPTIMIZER_STATE = ("step", "state", "param_groups", "scheduler")
"""What an optimizer's state has, whatever else a job adds."""


class Calls:
    """The calls, by name; arguments and answers are what `rpcmp.rpc.tensors` can carry.

    Calls that change the model are numbered by whoever makes them. After some of them, never while
    there are gradients, all stages keep what they are under the call's number, so that a later
    group can go on from there.

    Args:
        config, group: the job.
        state: what this was, as `state` gave it, when the group was what it goes on from.
        kept: the number that it goes on from.
        metrics: those that the driver computes.

    Attributes:
        step: optimizer steps that the group has done.
        version: the number of the call that is being answered; 0: it changes nothing.
        kept: the newest number that all stages have kept something under.
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
        """All that the driver itself has to know to go on from here, as plain values."""
        scaler = self._group.optimizer.scaler
        return {"step": self.step, "scaler": None if scaler is None else asdict(scaler.state)}

    def train_step(self, inputs: Any, targets: Any) -> float:
        """One optimizer step; returns the mean loss."""
        self._require_scaled()
        # Held, so that after an error in any stage's backward none of them has stepped.
        version = self.version if self._is_due() else 0
        batch = Loaded(inputs, targets)
        started = self._group.start_step(batch, self.step + 1, AfterRound.HOLD, version)
        loss = self._group.finish_step(started).loss
        try:
            self._group.end_step(started, loss)
        except LossScaleError:  # the stages have counted it, and kept what they are
            self._note_step(version)
            raise
        self._note_step(version)
        return loss

    def forward_backward(self, inputs: Any, targets: Any) -> float:
        """Accumulate gradients; returns the mean loss."""
        self._require_scaled()
        self._has_gradients = True
        return self._group.forward_backward(Loaded(inputs, targets), self.step + 1)

    def evaluate(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """Number of samples, loss and metrics."""
        self._metrics.reset()
        found = self._group.evaluate(Loaded(inputs, targets), self.step, self._metrics)
        metrics = {**found.metrics, **self._metrics.compute()}
        return {"num_samples": found.num_samples, "loss": found.loss, "metrics": metrics}

    def predict(self, inputs: Any) -> Any:
        """The last stage's outputs."""
        return self._group.predict(inputs, self.step)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the unsplit model."""
        return self._group.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over parameters and buffers."""
        self._group.load_state_dict(state)
        self._keep()

    def parameters_sha256(self) -> str:
        """The hash of rpcmp.rpc.tensors."""
        return self._group.parameters_sha256()

    def live_state(self) -> dict[str, dict[str, int]]:
        """Counts of what a step must not leave behind, by stage."""
        return self._group.live_state()

    def optimizer_step(self) -> bool:
        """Update the parameters and clear the gradients; whether the step was not skipped."""
        skipped = self.scaler_state()["skipped"]
        self._group.step()
        self.step += 1
        self._has_gradients = False
        self._keep()
        return bool(self.scaler_state()["skipped"] == skipped)

    def scaler_state(self) -> dict[str, Any]:
        """The loss scaler's state; without one that of a scaler which changes nothing."""
        scaler = self._group.optimizer.scaler
        return asdict(ScalerState(1.0) if scaler is None else scaler.state)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._group.zero_grad()
        self._has_gradients = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Clip the gradients; returns their norm before."""
        return float(self._group.optimizer.clip_grad_norm_(max_norm, norm_type))

    def step_scheduler(self, loss: float) -> None:
        """Let the learning-rate schedulers step."""
        self._group.optimizer.step_scheduler(loss)
        self._keep()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizers' and schedulers' state."""
        return {"step": self.step, **self._group.optimizer.state_dict()}

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `optimizer_state_dict` returned.

        Raises:
            ConfigError: it is something else.
        """
        if missing := [key for key in OPTIMIZER_STATE if key not in state]:
            raise ConfigError(
                f"this is no state of a pipeline's optimizer: it has no {', '.join(missing)}; load "
                "what pipeline.optimizer.state_dict() returned"
            )
        self._group.optimizer.load_state_dict(state)
        self.step = state["step"]
        self._keep()

    def _note_step(self, version: int) -> None:
        self.step += 1
        self._has_gradients = False
        self.kept = version or self.kept

    def _require_scaled(self) -> None:
        """Refuse to mix gradients, or to compute some that cannot be finite.

        Those that there are are cleared, as after any failure to differentiate.
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
            self._group.keep(self.version)
            self.kept = self.version


_METHODS = {
    name: method for name, method in vars(Calls).items() if callable(method) and name[0] != "_"
}


def serve(calls: Calls, fd: int, activity: Activity) -> None:
    """Answer calls until the caller hangs up.

    Args:
        calls: what can be asked.
        fd: this process's end of the socket pair.
        activity: told what is being answered.
    """
    handoff = Handoff(socket.socket(fileno=fd))
    while True:
        try:
            calls.version, name, *arguments = handoff.receive()
        except EOFError:
            return
        with activity.during(name[:PHASE_BYTES], calls.step + 1):
            answer = _answer(_METHODS[name], calls, arguments)
        try:
            handoff.send(answer)
        except TypeError as error:  # the model's outputs hold something that is no tensor
            handoff.send({"error": to_wire(JobError(f"{name}: {error}"))})


def _answer(method: Callable[..., Any], calls: Calls, arguments: list[Any]) -> dict[str, Any]:
    try:
        result = method(calls, *arguments)
        return {"result": result, "state": calls.state, "kept": calls.kept}
    except LossScaleError as error:  # which is no failure: the call has been counted
        return {"error": to_wire(error), "state": calls.state, "kept": calls.kept}
    except RpcmpError as error:
        return {"error": to_wire(error)}
    except Exception as error:
        return {"error": to_wire(JobError(f"{method.__name__} failed: {one_line(error)}"))}
