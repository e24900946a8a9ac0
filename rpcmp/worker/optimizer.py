"""A stage's optimizer: an ordinary torch.optim one, or the user's own.

Gradients lie in `.grad` of the stage's parameters, so any optimizer and scheduler works unchanged.
`rpcmp.driver.optimizer` is the handle for all stages together.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpcmp.checkpoint.stage_state import StageState
from rpcmp.config import importing
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, RpcmpError, StageError, one_line
from rpcmp.observability.trace.spans import NO_MICROBATCH, Kind
from rpcmp.pipelining import layers, optimizers
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc.messages import StepReport
from rpcmp.worker.executor import ComputeThread
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer_state import KeptState, OptimizerState
from rpcmp.worker.option_overrides import BuiltOptions, Options, renewed
from rpcmp.worker.precision import LossScale, require_unscalable, unscale
from rpcmp.worker.rehearsal import require_restorable, require_steppable


class StageOptimizer:
    """One stage's optimizer and scheduler; all of it runs on the stage's compute thread.

    Args:
        model: whose parameters are optimized; those that require grad.
        assignment: the config, with the stage's own optimizer arguments.
        compute: where it runs.
        stepped: called after each step, with its number; may raise StageError.
        loss_scale: of the gradients; None: they are not scaled.
        rehearses: whether to try that an optimizer of somebody else's can be restored.

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
        rehearses: bool = True,
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
        source = self._source = config.optimizer_of(assignment.stage_index)
        trained = {n: value for n, value in model.named_parameters() if value.requires_grad}
        self._trained = list(trained.values())
        self._named = {n: value for n, value in trained.items() if n not in model.foreign}
        self.names = list(self._named)
        self._parameters = list(self._named.values())
        if loss_scale is not None:
            require_unscalable(self._label, self._named.items())
        self._schedule = config.scheduler_of(assignment.stage_index)
        self._seed = config.seed
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._kept: OptimizerState | None = None
        self._built: BuiltOptions | None = None
        if not self._parameters:
            return
        self._optimizer, self._scheduler = self._build(self._named)
        require_steppable(self._optimizer, "optimizer")
        if config.takes_snapshots:
            if rehearses and not _is_torchs_own(self._optimizer, self._scheduler):
                group_of = functools.partial(optimizers.group_of, source)
                what = f"optimizer = {type(self._optimizer).__name__}"
                require_restorable(self._build, self._named, group_of, what)
            self._kept = OptimizerState(self._optimizer, self._named, f"stage {self.stage!r}")
            options = copy.deepcopy((self._kept.groups(), self._scheduler_state()))
            self._built = BuiltOptions(_asked(source, self._schedule), *options)

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
                for name, parameter in self._named.items()
                if parameter.grad is not None
            }
        )

    def scale(self, factor: Tensor) -> Future[Any]:
        """Multiply all gradients by the float32 scalar `factor`."""
        return self._run(lambda: self._scale(factor))

    def step_scheduler(self, loss: float) -> Future[Any]:
        """Let the scheduler step; `loss` is for those that watch one."""
        return self._run(lambda: self._step_scheduler(loss))

    def parts(self) -> tuple[dict[str, Any], Any, Any, Any, Any]:
        """What a StageState has of it: `state`, `groups`, `scheduler`, `built` and `aside`.

        Not copied, on the compute thread.
        """
        if self._optimizer is None:
            return {}, None, None, None, None
        kept, built = self._keeper.read(), self._built
        self._keeper.warn_of_hidden()
        began = None if built is None else built._asdict()
        return kept.state, kept.groups, self._scheduler_state(), began, kept.aside

    def restore(self, state: StageState) -> None:
        """Go on where `state` was, before the group begins; under the config's own options."""
        self.steps = state.step
        if self._optimizer is None:
            return
        options = Options(state.groups, state.scheduler)
        if self._built is not None and state.built is not None:
            then = BuiltOptions(**state.built)
            options = renewed(options, then, self._built, self._keeper.defaults)
        self._load(KeptState(state.state, options.groups, state.aside), options.scheduler)

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
            with self._compute.activity.during("optimizer", self.steps + 1):
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
            layers.seed_all(self._seed, "optimizer", self.steps + 1, self.stage)
            self._optimizer.step()
        self._zero_grad()
        self.steps += 1
        self._stepped(self.steps)
        recorder = self._compute.recorder
        recorder.add(Kind.OPTIMIZER, self.steps, NO_MICROBATCH, started, started)
        self.report = StepReport(self.steps, recorder.take_busy(), self._learning_rates())
        return self.report

    def _learning_rates(self) -> list[float]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [float(group["lr"]) for group in groups if group.get("lr") is not None]

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

    @property
    def _keeper(self) -> OptimizerState:
        if self._kept is None:  # a program of the user's asks where nothing is stored
            self._kept = OptimizerState(self._optimizer, self._named, f"stage {self.stage!r}")
        return self._kept

    def _build(self, named: Mapping[str, nn.Parameter]) -> tuple[Any, Any]:
        """The optimizer of these parameters, and its scheduler."""
        optimizer = optimizers.create(self._source, named)
        if self._schedule is None:
            return optimizer, None
        return optimizer, importing.create(self._schedule, "scheduler", optimizer)

    def _scheduler_state(self) -> Any:
        return None if self._scheduler is None else self._scheduler.state_dict()

    def _state_dict(self) -> dict[str, Any]:
        state, groups, scheduler, _, aside = self.parts()
        if self._optimizer is None:
            return {"state": {}, "param_groups": {}, "scheduler": {}, "aside": {}}
        return {
            "state": state,
            "param_groups": {self.stage: groups},
            "scheduler": {self.stage: scheduler},
            "aside": {} if aside is None else {self.stage: aside},
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        if self._optimizer is None:
            return
        aside = state.get("aside", {}).get(self.stage)
        kept = KeptState(state["state"], state["param_groups"].get(self.stage), aside)
        self._load(kept, state["scheduler"].get(self.stage))

    def _load(self, kept: KeptState, scheduler: Any) -> None:
        if kept.groups is None:
            raise ConfigError(f"the optimizer state knows no stage {self.stage!r}")
        self._keeper.load(kept)
        if self._scheduler is not None and scheduler is not None:
            self._scheduler.load_state_dict(scheduler)


def _is_torchs_own(*things: Any) -> bool:
    """Whether these are torch's, or None: tested to come back as they were."""
    return all(
        thing is None or type(thing).__module__.partition(".")[0] == "torch" for thing in things
    )


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
