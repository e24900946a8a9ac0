"""A stage's optimizer: an ordinary torch.optim one.

Gradients lie in `.grad` of the stage's parameters, so any torch optimizer and scheduler works
unchanged. `rpcmp.driver.optimizer` is the handle for all stages together.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpcmp import factory
from rpcmp.errors import CheckpointError, ConfigError, RpcmpError, StageError, one_line
from rpcmp.kinds import Factory
from rpcmp.plan import Assignment
from rpcmp.snapshot.state import StageState
from rpcmp.trace.spans import NO_MICROBATCH, Kind
from rpcmp.work import StepReport
from rpcmp.worker.compute import ComputeThread
from rpcmp.worker.model import StageModel
from rpcmp.worker.precision import LossScale, require_unscalable, unscale
from rpcmp.worker.renewal import Built, Options, renewed


class StageOptimizer:
    """One stage's optimizer and scheduler; all of it runs on the stage's compute thread.

    Args:
        model: whose parameters are optimized; those that require grad.
        assignment: the config, with the stage's own optimizer arguments.
        compute: where it runs.
        stepped: called after each step, with its number; may raise StageError.
        loss_scale: of the gradients; None: they are not scaled.

    Raises:
        FactoryError: the optimizer or scheduler does not import, or refuses its arguments.
        ConfigError: a parameter's gradient cannot be unscaled.

    Attributes:
        steps: how many it has done, skipped ones included.
        report: of the last one.
        names: of the parameters that it has.
    """

    def __init__(
        self,
        model: StageModel,
        assignment: Assignment,
        compute: ComputeThread,
        stepped: Callable[[int], None] = lambda step: None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.stage = assignment.stage_name
        self._label = assignment.member.label
        self._stepped = stepped
        self._loss_scale = loss_scale
        self.steps = 0
        self.report: StepReport | None = None
        self._compute = compute
        config = assignment.config
        self._steps_scheduler = config.steps_scheduler("step") and not config.holds_steps
        source = config.optimizer_of(assignment.stage_index)
        trained = {n: value for n, value in model.named_parameters() if value.requires_grad}
        self._trained = list(trained.values())
        self.names = [name for name in trained if name not in model.foreign]
        self._parameters = [trained[name] for name in self.names]
        if loss_scale is not None:
            require_unscalable(self._label, zip(self.names, self._parameters, strict=True))
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        if self._parameters:
            self._optimizer = factory.create(source, "optimizer", self._parameters)
        schedule = config.scheduler_of(assignment.stage_index)
        if self._optimizer is not None and schedule is not None:
            self._scheduler = factory.create(schedule, "scheduler", self._optimizer)
        self._built: Built | None = None
        if config.takes_snapshots and (options := self._options()) is not None:
            self._built = Built(_asked(source, schedule), *copy.deepcopy(options))

    def step_now(self) -> None:
        """Step, at the end of a round that nobody has to look at; on the compute thread.

        Raises:
            StageError: the user's optimizer or scheduler raised.
        """
        self._guard(self._step)
        if self._steps_scheduler:
            self._guard(lambda: self._step_scheduler(0.0))

    def step(self, updates: bool = True) -> Future[Any]:
        """Update the parameters and clear the gradients; answers with a StepReport.

        Args:
            updates: whether there is anything to update; False: the step is skipped.
        """
        return self._run(lambda: self._step(updates))

    def finish(
        self,
        factor: Tensor | None,
        loss: float | None,
        updates: bool = True,
        next_scale: float | None = None,
    ) -> Future[Any]:
        """End a round that was held; answers with a StepReport.

        Args:
            factor: scales the gradients before the step.
            loss: lets the scheduler step as well.
            updates: whether the optimizer and the scheduler step; False: the step is skipped.
            next_scale: of the next step's loss.
        """
        return self._run(lambda: self._finish(factor, loss, updates, next_scale))

    def unscale(self, inverse: float) -> Future[Any]:
        """Multiply all gradients by `inverse`; answers whether all of them are finite."""
        return self._run(lambda: unscale(self._parameters, inverse))

    def set_scale(self, scale: float) -> Future[Any]:
        """Scale the gradients of all that follows by `scale`."""
        return self._run(lambda: self._set_scale(scale))

    def zero_grad(self) -> Future[Any]:
        """Clear the gradients."""
        return self._run(self._zero_grad)

    def norms(self, norm_type: float) -> Future[Any]:
        """The norm of each parameter's gradient by name; without those that have none."""
        return self._run(
            lambda: {
                name: torch.linalg.vector_norm(parameter.grad, norm_type).cpu()
                for name, parameter in zip(self.names, self._parameters, strict=True)
                if parameter.grad is not None
            }
        )

    def scale(self, factor: Tensor) -> Future[Any]:
        """Multiply all gradients by the float32 scalar `factor`."""
        return self._run(lambda: self._scale(factor))

    def step_scheduler(self, loss: float) -> Future[Any]:
        """Let the scheduler step; `loss` is for those that watch one."""
        return self._run(lambda: self._step_scheduler(loss))

    def parts(self) -> tuple[dict[str, Any], Any, Any, Any]:
        """State by parameter, options, the scheduler's state, and both of these as they were built.

        Not copied, on the compute thread.
        """
        state, built = self._state_dict(), self._built
        groups, scheduler = state["param_groups"], state["scheduler"]
        began = None if built is None else built._asdict()
        return state["state"], groups.get(self.stage), scheduler.get(self.stage), began

    def restore(self, state: StageState) -> None:
        """Go on where `state` was, before the group begins; under the config's own options."""
        self.steps = state.step
        options = Options(state.groups, state.scheduler)
        if self._optimizer is not None and self._built is not None and state.built is not None:
            then = Built(**state.built)
            options = renewed(options, then, self._built, self._optimizer.defaults)
        self._load_state_dict(
            {
                "state": state.state,
                "param_groups": {self.stage: options.groups},
                "scheduler": {self.stage: options.scheduler},
            }
        )
        self._undo_casts(state)

    def _undo_casts(self, state: StageState) -> None:
        """torch gives what an optimizer keeps its parameter's dtype, which may not be its own."""
        if self._optimizer is None:
            return
        for name, parameter in zip(self.names, self._parameters, strict=True):
            found = self._optimizer.state[parameter]
            for key, value in state.state.get(name, {}).items():
                if isinstance(value, Tensor) and found[key].dtype is not value.dtype:
                    found[key] = value.to(found[key].device)
        self._lay_out()

    def state_dict(self) -> Future[Any]:
        """The state by parameter name, the group's options and the scheduler's state, on the host.

        Messages carry nothing else.
        """
        return self._run(lambda: _on_host(self._state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> Future[Any]:
        """Take over what `DistributedOptimizer.state_dict` returned."""
        return self._run(lambda: self._load_state_dict(state))

    def _run(self, function: Callable[[], Any]) -> Future[Any]:
        return self._compute.future(lambda: self._guard(function))

    def _guard(self, function: Callable[[], Any]) -> Any:
        """What `function` returns; what the user's optimizer raises names the stage."""
        try:
            with self._compute.activity.doing("optimizer", self.steps + 1):
                return function()
        except RpcmpError:
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            step = self.steps + 1
            raise StageError(self._label, "optimizer", one_line(error), text, step) from error

    def _finish(
        self, factor: Tensor | None, loss: float | None, updates: bool, next_scale: float | None
    ) -> StepReport:
        if factor is not None:
            self._scale(factor)
        report = self._step(updates)
        if loss is not None and updates:
            self._step_scheduler(loss)
        if next_scale is not None:
            self._set_scale(next_scale)
        self._compute.release()
        return report

    def _set_scale(self, scale: float) -> None:
        if self._loss_scale is not None:
            self._loss_scale.value = scale

    def _step(self, updates: bool = True) -> StepReport:
        started = time.perf_counter_ns()
        if self._optimizer is not None and updates:
            self._optimizer.step()
        self._zero_grad()
        self.steps += 1
        self._stepped(self.steps)
        recorder = self._compute.recorder
        recorder.add(Kind.OPTIMIZER, self.steps, NO_MICROBATCH, started, started)
        rate = None if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])
        self.report = StepReport(self.steps, recorder.take_busy(), rate)
        return self.report

    def _zero_grad(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _scale(self, factor: Tensor) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))

    def _step_scheduler(self, loss: float) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
        elif self._scheduler is not None:
            self._scheduler.step()

    def _state_dict(self) -> dict[str, Any]:
        options = self._options()
        if self._optimizer is None or options is None:
            return {"state": {}, "param_groups": {}, "scheduler": {}}
        state = self._optimizer.state_dict()["state"]
        return {
            "state": {self.names[index]: value for index, value in state.items()},
            "param_groups": {self.stage: options.groups},
            "scheduler": {self.stage: options.scheduler},
        }

    def _options(self) -> Options | None:
        """What the optimizer and the scheduler are now, not copied; None: there is none."""
        if self._optimizer is None:
            return None
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return Options(groups, self._scheduler.state_dict() if self._scheduler else None)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        if self._optimizer is None:
            return
        own = self._optimizer.state_dict()
        groups = state["param_groups"].get(self.stage)
        if groups is None or len(groups) != len(own["param_groups"]):
            raise ConfigError(
                f"the optimizer state knows no stage {self.stage!r}, or one with another number of "
                "parameter groups"
            )
        self._require_shapes(state["state"], own["param_groups"])
        self._optimizer.load_state_dict(
            {
                "state": {
                    index: state["state"][name]
                    for index, name in enumerate(self.names)
                    if name in state["state"]
                },
                "param_groups": [
                    {**group, **_how(mine), "params": mine["params"]}
                    for group, mine in zip(groups, own["param_groups"], strict=True)
                ],
            }
        )
        self._lay_out()
        self._require_options()
        scheduler = state["scheduler"].get(self.stage)
        if self._scheduler is not None and scheduler is not None:
            self._scheduler.load_state_dict(scheduler)

    def _require_shapes(
        self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Check shapes for a fused kernel, which writes beyond a state that is too small.

        Raises:
            CheckpointError: it has another.
        """
        if not any(group.get("fused") for group in groups):
            return
        for name, parameter in zip(self.names, self._parameters, strict=True):
            for key, value in state.get(name, {}).items():
                fits = key == "step" or not isinstance(value, Tensor)
                if not fits and value.shape != parameter.shape:
                    raise CheckpointError(
                        f"{key!r} of parameter {name!r} of stage {self.stage!r} has shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}: it is "
                        "another model's, or damaged; resume from another checkpoint"
                    )

    def _lay_out(self) -> None:
        """Give what was loaded for a fused kernel the strides of its parameter.

        The kernel goes through their memory in step, and files and messages keep no strides: a
        state that was not channels-last, as its parameter is, would meet other elements; and one
        that is expanded has less memory than it says.
        """
        assert self._optimizer is not None
        if not any(group.get("fused") for group in self._optimizer.param_groups):
            return
        for parameter in self._parameters:
            found = self._optimizer.state[parameter]
            for key, value in found.items():
                is_like_it = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_like_it and value.stride() != parameter.stride():
                    found[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def _require_options(self) -> None:
        """Another kind of optimizer has other options, and would miss its own in its next step."""
        assert self._optimizer is not None
        known = self._optimizer.param_groups[0]
        if missing := [key for key in self._optimizer.defaults if key not in known]:
            raise ConfigError(
                f"the optimizer state of stage {self.stage!r} is another optimizer's than "
                f"{type(self._optimizer).__name__}'s: it has no {', '.join(missing)}"
            )


def _how(group: Mapping[str, Any]) -> dict[str, Any]:
    """By which kernels a group is stepped: its own choice, whatever is loaded."""
    return {key: group[key] for key in ("fused", "foreach", "capturable") if key in group}


def _asked(*factories: Factory | None) -> str:
    """A hash: what is given to the user's own code may be told to it in confidence."""
    given = [None if one is None else one.model_dump(mode="json") for one in factories]
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def _on_host(state: Any) -> Any:
    """`state` with its tensors in the host's memory; what is a scheduler's own stays as it is."""
    if isinstance(state, Tensor):
        return state.cpu()
    if type(state) is dict:
        return {key: _on_host(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_on_host, state))
    return state
