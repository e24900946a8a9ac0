"""A stage's optimizer: an ordinary torch.optim one, or the user's own.

Gradients lie in `.grad` of the stage's parameters, so any optimizer and scheduler works unchanged.
`rpcmp.driver.distributed_optimizer` is the handle for all stages together.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.checkpoint.stage_state import StageState
from rpcmp.config import importing
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, RpcmpError, some_of
from rpcmp.observability.trace.spans import NO_MICROBATCH, Kind
from rpcmp.pipelining import devices, optimizers, random_streams
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc.messages import StepReport
from rpcmp.worker.executor import ComputeThread, ComputeThreadOwner, Result, on_compute_thread
from rpcmp.worker.failure import stage_failure
from rpcmp.worker.model import LossScale, StageModel
from rpcmp.worker.optimizer_state import BuiltOptions, KeptState, OptimizerState, merge_options
from rpcmp.worker.rehearsal import (
    HiddenState,
    require_restorable,
    require_steppable,
    require_watching_the_loss,
)

log = logging.getLogger(__name__)


class StageOptimizer(ComputeThreadOwner):
    """One stage's optimizer and scheduler; all of it runs on the stage's compute thread.

    Args:
        after_step: called after each step with its number; may raise StageError.
        loss_scale: of the gradients; None: they are not scaled.
        rehearses: whether to try that an optimizer that is not torch's can be restored.

    Attributes:
        steps: number of steps so far, including skipped ones.
        report: of the last step.
        names: of its parameters.
    """

    def __init__(
        self,
        model: StageModel,
        assignment: Assignment,
        compute: ComputeThread,
        after_step: Callable[[int], None] = lambda step: None,
        loss_scale: LossScale | None = None,
        rehearses: bool = True,
    ) -> None:
        self.stage = assignment.stage_name
        self._label = assignment.member.label
        self._after_step, self._before_step = after_step, model.put_back
        self._loss_scale, self._variables = loss_scale, model.variables
        self._hidden_parameters = model.hidden
        self.steps = 0
        self.report: StepReport | None = None
        self._compute = compute
        config = assignment.config
        self._steps_scheduler = config.steps_scheduler("step") and not config.holds_steps
        source = self._source = config.optimizer_of(assignment.stage_index)
        named = dict(model.named_parameters())
        trained = {n: value for n, value in named.items() if value.requires_grad}
        self._frozen = {n: value for n, value in named.items() if not value.requires_grad}
        self._trained = list(trained.values())
        self._named = {n: value for n, value in trained.items() if n not in model.foreign}
        self.names = list(self._named)
        self._parameters = list(self._named.values())
        if loss_scale is not None:
            _require_unscalable(self._label, self._named.items())
        self._schedule = config.scheduler_of(assignment.stage_index)
        self._seed = config.seed
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._built: BuiltOptions | None = None
        if not self._parameters:
            return
        self._optimizer, self._scheduler = self._build(self._named)
        require_steppable(self._optimizer, "optimizer")
        if config.takes_snapshots:
            if rehearses and not self._is_torchs_own():
                group_of = functools.partial(optimizers.group_of, source)
                what = f"optimizer = {type(self._optimizer).__name__}"
                require_restorable(self._build, self._named, group_of, what)
            _ = self._hidden
            options = copy.deepcopy((self._keeper.groups(), self._scheduler_state()))
            self._built = BuiltOptions(_asked(source, self._schedule), *options)

    def step_now(self) -> None:
        """Step at the end of a round that does not wait for the driver; on the compute thread."""
        self._guard(self._step)
        if self._steps_scheduler:
            self._guard(lambda: self._step_scheduler(0.0))

    @on_compute_thread
    def step(self, updates: bool = True) -> StepReport:
        return self._step(updates)

    @on_compute_thread
    def finish(
        self,
        factor: Tensor | None,
        loss: float | None,
        updates: bool = True,
        next_scale: float | None = None,
    ) -> StepReport:
        """End a round that was held.

        Args:
            factor: scales the gradients before the step.
            loss: lets the scheduler step as well.
            updates: whether the optimizer and the scheduler step; False: the step is skipped.
            next_scale: of the next step's loss.
        """
        if factor is not None:
            self._scale(factor)
        report = self._step(updates)
        if loss is not None and updates:
            self._step_scheduler(loss)
        if next_scale is not None:
            self._set_scale(next_scale)
        self._compute.release()
        return report

    @on_compute_thread
    def unscale(self, inverse: float) -> bool:
        """Multiply all gradients by `inverse`; returns whether all of them are finite."""
        return _unscale(self._parameters, inverse)

    @on_compute_thread
    def set_scale(self, scale: float) -> None:
        """Multiply the losses of the next steps by `scale`."""
        self._set_scale(scale)

    @on_compute_thread
    def zero_grad(self) -> None:
        self._zero_grad()

    @on_compute_thread
    def norms(self, norm_type: float) -> dict[str, Tensor]:
        """Return the norm of each gradient that is not None, by the parameter's name."""
        return devices.scalars_to_host(
            {
                name: torch.linalg.vector_norm(parameter.grad, norm_type)
                for name, parameter in self._named.items()
                if parameter.grad is not None
            }
        )

    @on_compute_thread
    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by the float32 scalar `factor`."""
        self._scale(factor)

    @on_compute_thread
    def step_scheduler(self, loss: float) -> None:
        """Step the scheduler; `loss` is for those that watch one."""
        self._step_scheduler(loss)

    def parts(self) -> tuple[dict[str, Any], Any, Any, Any, Any]:
        """Return state, groups, scheduler, built options and `aside` of a StageState, no copies."""
        if self._optimizer is None:
            return {}, None, None, None, None
        kept = self._keeper.read()
        self._hidden.warn_of_changes()
        built = None if self._built is None else self._built._asdict()
        return kept.state, kept.groups, self._scheduler_state(), built, kept.aside

    def restore(self, state: StageState) -> None:
        """Restore `state` before the group starts, with options that the config has changed."""
        self.steps = state.step
        if self._optimizer is None:
            return
        if state.groups is None:  # all of the stage was frozen until now
            self._catch_up()
            return
        groups, scheduler = state.groups, state.scheduler
        if self._built is not None and state.built is not None:
            then = BuiltOptions(**state.built)
            groups, scheduler = merge_options(
                groups, scheduler, then, self._built, self._keeper.defaults
            )
        self._load(KeptState(state.state, groups, state.aside), scheduler)

    def _catch_up(self) -> None:
        """Let a new scheduler be where those of the other stages are."""
        if self._scheduler is not None and not self._steps_scheduler:
            raise ConfigError(
                f"stage {self.stage!r} was frozen until step {self.steps}, and how often its "
                "scheduler should have stepped by now is not known: leave it frozen, or resume "
                'with scheduler_interval = "step" or without a scheduler'
            )
        for _ in range(self.steps if self._scheduler is not None else 0):
            with warnings.catch_warnings():  # that the optimizer has not stepped
                warnings.simplefilter("ignore")
                self._scheduler.step()

    @on_compute_thread
    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, the options and the scheduler's state, on the host.

        Messages carry nothing else.
        """
        state, groups, scheduler, _, aside = self.parts()
        if self._optimizer is None:
            return {"state": {}, "param_groups": {}, "scheduler": {}, "aside": {}}
        parts = {
            "state": state,
            "param_groups": {self.stage: groups},
            "scheduler": {self.stage: scheduler},
            "aside": {} if aside is None else {self.stage: aside},
        }
        return {name: _on_host(part) for name, part in parts.items()}

    @on_compute_thread
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `DistributedOptimizer.state_dict`."""
        if self._optimizer is None:
            return
        aside = state.get("aside", {}).get(self.stage)
        kept = KeptState(state["state"], state["param_groups"].get(self.stage), aside)
        self._load(kept, state["scheduler"].get(self.stage))

    def _guard(self, function: Callable[[], Result]) -> Result:
        """Call `function`; errors of the user's optimizer become errors of this stage."""
        try:
            with self._compute.activity.during("optimizer", self.steps + 1):
                return function()
        except RpcmpError:
            raise
        except BaseException as error:
            raise stage_failure(self._label, "optimizer", error, self.steps + 1) from error

    def _set_scale(self, scale: float) -> None:
        if self._loss_scale is not None:
            self._loss_scale.value = scale

    def _step(self, updates: bool = True) -> StepReport:
        started = time.perf_counter_ns()
        if not self.steps:
            self._tell_untrained()
        try:
            self._require_no_hidden_gradient()
            self._before_step()  # a replica may have had no forward since an evaluation
            self._require_frozen()
        except ConfigError as error:
            raise stage_failure(self._label, "optimizer", error, self.steps + 1) from error
        if self._optimizer is not None and updates:
            random_streams.seed_all(self._seed, "optimizer", self.steps + 1, self.stage)
            self._optimizer.step()  # stage.py [13]
        self._zero_grad()
        self.steps += 1
        self._after_step(self.steps)
        recorder = self._compute.recorder
        recorder.add(Kind.OPTIMIZER, self.steps, NO_MICROBATCH, started, started)
        variables = None if self._variables is None else self._variables.after_step()
        figures = *recorder.take(), self._learning_rates()
        self.report = StepReport(self.steps, *figures, variables)
        return self.report

    def _require_frozen(self) -> None:
        """Refuse what was frozen when the optimizer was made, and is not any more."""
        if thawed := [name for name, each in self._frozen.items() if each.requires_grad]:
            raise ConfigError(
                f"{some_of(thawed)}: frozen when the stage was built, and trained since step "
                f"{self.steps + 1}, by no optimizer: let requires_grad be as it is from the start, "
                "with a rate of zero until then, or --resume with other frozen parameters"
            )

    def _require_no_hidden_gradient(self) -> None:
        """Refuse a parameter that is trained in one process, by a module of another stage."""
        hidden, self._hidden_parameters = self._hidden_parameters, {}  # a look at the first step
        if names := [name for name, each in hidden.items() if each.grad is not None]:
            raise ConfigError(
                f"a gradient has come to {some_of(names)}, of modules that the layers of this "
                "stage reach and have not, so no optimizer trains them: let a layer have them as "
                "attributes, and `tied` name them if several layers do, or freeze them"
            )

    def _tell_untrained(self) -> None:
        """Name the parameters that the first step leaves as they are, since no gradient came."""
        names = [name for name, parameter in self._named.items() if parameter.grad is None]
        if names:
            log.warning(
                "no gradient has come to %s in the first step, so they stay as they are: nothing "
                "that the loss reads depends on them, or it was detached",
                some_of(names),
            )

    def _learning_rates(self) -> list[float]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [float(group["lr"]) for group in groups if group.get("lr") is not None]

    def _zero_grad(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _scale(self, factor: Tensor) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                if factor.device != parameter.grad.device:  # once: a stage has one device
                    # Filled in by a kernel: for a copy, the host would wait.
                    factor = torch.full_like(factor, factor.item(), device=parameter.grad.device)
                parameter.grad.mul_(factor)

    def _step_scheduler(self, loss: float) -> None:
        optimizers.step_scheduler(self._scheduler, loss)

    @functools.cached_property
    def _keeper(self) -> OptimizerState:
        return OptimizerState(self._optimizer, self._named, f"stage {self.stage!r}")

    @functools.cached_property
    def _hidden(self) -> HiddenState:
        """State that no snapshot holds, as it was before the first step that may be kept."""
        return HiddenState(self._keeper)

    def _build(self, named: Mapping[str, nn.Parameter]) -> tuple[Any, Any]:
        optimizer = optimizers.create(self._source, named)
        if self._schedule is None:
            return optimizer, None
        scheduler = importing.create(self._schedule, "scheduler", optimizer)
        require_watching_the_loss(scheduler, self._schedule.callable)
        return optimizer, scheduler

    def _is_torchs_own(self) -> bool:
        """Whether all is torch's; tests show that this can be restored.

        What a function of the user's returns is not: torch's optimizers take hooks.
        """
        sources = [self._source.callable, *([self._schedule.callable] if self._schedule else [])]
        kinds = [type(each) for each in (self._optimizer, self._scheduler) if each is not None]
        return all(
            name.partition(".")[0] == "torch"
            for name in (*sources, *(kind.__module__ for kind in kinds))
        )

    def _scheduler_state(self) -> Any:
        return None if self._scheduler is None else self._scheduler.state_dict()

    def _load(self, kept: KeptState, scheduler: Any) -> None:
        if kept.groups is None:
            raise ConfigError(f"the optimizer state knows no stage {self.stage!r}")
        self._keeper.load(kept)
        _ = self._hidden
        if self._scheduler is not None and scheduler is not None:
            self._scheduler.load_state_dict(scheduler)


def _asked(*factories: Factory | None) -> str:
    """A hash, because arguments of the user's code may be confidential."""
    sections = [None if one is None else one.model_dump(mode="json") for one in factories]
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def _on_host(state: Any) -> Any:
    """`state` with its tensors in the host's memory; other objects stay as they are."""
    if isinstance(state, Tensor):
        return state.cpu()
    if type(state) is dict:
        return {key: _on_host(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_on_host, state))
    return state


def _require_unscalable(stage: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in parameters:
        if parameter.dtype is torch.float16:
            raise ConfigError(
                f"stage {stage!r}: the parameter {name!r} is float16, so its gradient cannot be "
                "unscaled; keep parameters in float32, autocast computes in float16 all the same"
            )


def _unscale(parameters: Iterable[nn.Parameter], inverse: float) -> bool:
    """Multiply all gradients by `inverse`, 1 / scale; return whether all of them are finite.

    Same arithmetic as `torch.amp.GradScaler.unscale_`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    are_finite = [
        bool((each.coalesce().values() if each.is_sparse else each).isfinite().all())
        for each in gradients
    ]
    for gradient in gradients:
        gradient.mul_(inverse)
    return all(are_finite)
