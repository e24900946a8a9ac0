"""A stage's optimizer and scheduler, without other processes."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from rpcmp.checkpoint.stage_state import StageState
from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.rpc.transport import result
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer
from tests.support.stageoptimizers import made, state

OWN = {
    "optimizer": {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.5}},
    "scheduler": {"callable": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}},
}


def train(model: StageModel, optimizer: StageOptimizer) -> None:
    """Train for one step."""
    for _, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step_now()


def test_each_stage_steps_by_its_own_rule() -> None:
    rates = []
    for index in range(2):
        model, optimizer = made(OWN, {}, of=index)
        for _ in range(2):
            train(model, optimizer)
        assert optimizer.report is not None
        rates.append(optimizer.report.learning_rate)
    assert rates == [0.05, 0.01]


def test_an_optimizer_restores_the_state_of_another_one() -> None:
    model, optimizer = made(OWN)
    train(model, optimizer)
    _, other = made(OWN)
    other.restore(state(model, optimizer))
    assert str(other.parts()) == str(optimizer.parts())


def own(*, scheduler: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return OWN with other arguments."""
    found = {"optimizer": {**OWN["optimizer"], "kwargs": {"lr": 0.5, **kwargs}}}
    return {**found, "scheduler": {**OWN["scheduler"], "kwargs": scheduler or {"step_size": 1}}}


def taken_over(before: dict[str, Any], after: dict[str, Any], steps: int = 2) -> StageState:
    """Return the state of a stage under config `after`, restored from one under `before`."""
    model, optimizer = made(before)
    for _ in range(steps):
        train(model, optimizer)
    other_model, other = made(after)
    other.restore(state(model, optimizer))
    return state(other_model, other)


def rates(found: StageState) -> list[float]:
    return [group["lr"] for group in found.groups]


def test_a_changed_learning_rate_wins_over_the_saved_one() -> None:
    plain = {"optimizer": OWN["optimizer"]}
    changed = {"optimizer": own(lr=0.125, weight_decay=0.25)["optimizer"]}
    found = taken_over(plain, changed)
    assert rates(found) == [0.125]
    assert found.groups[0]["weight_decay"] == 0.25
    assert all(int(each["step"]) == 2 for each in found.state.values())  # it is kept


def test_a_scheduler_continues_at_a_changed_learning_rate() -> None:
    found = taken_over(own(), own(lr=0.25))
    assert rates(found) == pytest.approx([0.25 * 0.1**2])
    assert found.scheduler["base_lrs"] == [0.25]
    assert found.scheduler["last_epoch"] == 2
    assert found.scheduler["_last_lr"] == rates(found)


def test_a_scheduler_without_an_initial_rate_continues_too() -> None:
    def plateau(lr: float) -> dict[str, Any]:
        callable_ = "torch.optim.lr_scheduler:ReduceLROnPlateau"
        return {**own(lr=lr), "scheduler": {"callable": callable_, "kwargs": {"patience": 0}}}

    model, optimizer = made(plateau(0.5))
    for _ in range(3):
        train(model, optimizer)
        optimizer.step_scheduler(1.0).wait()  # no better than the first, so the rate falls twice
    other_model, other = made(plateau(0.25))
    other.restore(state(model, optimizer))
    assert rates(state(other_model, other)) == pytest.approx([0.25 * 0.1**2])


def test_differences_between_processes_are_not_changes_of_the_config() -> None:
    starting = {"scheduler": {"callable": f"{__name__}:Starting"}}
    model, optimizer = made({**own(), **starting})
    train(model, optimizer)
    optimizer.step_scheduler(1.0).wait()
    for rate in (0.5, 0.25):
        other_model, other = made({**own(lr=rate), **starting})
        other.restore(state(model, optimizer))
        found = state(other_model, other)
        assert found.scheduler["best"] == 0.25
        assert rates(found) == pytest.approx([rate / 10])


class Starting(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose attribute `best` is NaN before its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 1)
        self.best = float("nan")

    def step(self, epoch: Any = None) -> None:
        super().step()
        self.best = 0.25


def test_changed_arguments_of_a_scheduler_win_over_the_saved_ones() -> None:
    found = taken_over(own(), own(scheduler={"step_size": 5, "gamma": 0.5}))
    assert (found.scheduler["step_size"], found.scheduler["gamma"]) == (5, 0.5)
    assert found.scheduler["last_epoch"] == 2
    assert rates(found) == pytest.approx([0.005])  # the rate that the old arguments led to is kept


def test_a_nested_scheduler_takes_a_changed_rate() -> None:
    def warming_up(lr: float) -> dict[str, Any]:
        return {**own(lr=lr), "scheduler": {"callable": f"{__name__}:warm_up"}}

    assert rates(taken_over(warming_up(0.5), warming_up(0.25), 3)) == pytest.approx(
        [rate / 2 for rate in rates(taken_over(warming_up(0.5), warming_up(0.5), 3))]
    )


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler: two steps of warm-up from a tenth of the rate, then decay."""
    schedulers = torch.optim.lr_scheduler
    up = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(optimizer, [up, schedulers.StepLR(optimizer, 1)], [2])


def test_a_new_scheduler_finds_the_options_that_it_needs() -> None:
    cycle = {
        "callable": "torch.optim.lr_scheduler:OneCycleLR",
        "kwargs": {"max_lr": 0.1, "total_steps": 9},
    }
    model, optimizer = made({"optimizer": OWN["optimizer"]})
    train(model, optimizer)
    other_model, other = made({"optimizer": OWN["optimizer"], "scheduler": cycle})
    other.restore(state(model, optimizer))
    train(other_model, other)
    assert other.report is not None
    assert other.report.learning_rate is not None


def test_state_among_the_options_is_not_a_change_of_the_config() -> None:
    """Schedule-free optimizers keep such state."""
    counting = {"optimizer": {"callable": f"{__name__}:Counting", "kwargs": {"lr": 0.5}}}
    found = taken_over(counting, {"optimizer": {**counting["optimizer"], "kwargs": {"lr": 0.25}}})
    assert (rates(found), found.groups[0]["k"]) == ([0.25], 2)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its options."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] += 1
        return super().step(closure)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    model, optimizer = made({})
    train(model, optimizer)
    _, other = made(OWN)
    with pytest.raises(ConfigError, match=r"'stage0' is another optimizer's than AdamW's.* betas"):
        other.restore(state(model, optimizer))


def test_a_sent_state_is_on_the_host_and_otherwise_unchanged() -> None:
    milestones = {"callable": "torch.optim.lr_scheduler:MultiStepLR"}
    steps = {**milestones, "kwargs": {"milestones": [1, 5]}}
    model, optimizer = made({"optimizer": OWN["optimizer"], "scheduler": steps})
    train(model, optimizer)
    sent = optimizer.state_dict().wait()
    assert isinstance(sent["scheduler"]["stage0"]["milestones"], Counter)
    tensors = [value for each in sent["state"].values() for value in each.values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert str(sent["state"]) == str(optimizer.parts()[0])


def test_a_stage_without_parameters_has_no_optimizer() -> None:
    model, optimizer = made({**OWN, "frozen": True})
    train(model, optimizer)
    assert optimizer.report is not None
    assert optimizer.report.learning_rate is None
    assert optimizer.parts() == ({}, None, None, None, None)


def load(optimizer: StageOptimizer, state: dict[str, Any]) -> None:
    result(optimizer.load_state_dict(state), "stage0")


FUSED = {"optimizer": {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.5, "fused": True}}}


def test_a_fused_kernel_gets_no_state_of_another_shape() -> None:
    """The kernel writes as many elements as the parameter has, beyond the end of smaller state."""
    model, optimizer = made(FUSED)
    train(model, optimizer)
    whole = optimizer.state_dict().wait()
    name = next(iter(whole["state"]))
    for key in ("exp_avg", "exp_avg_sq"):
        short = {**whole["state"][name], key: torch.zeros(1)}
        with pytest.raises(CheckpointError, match=f"{key!r} of parameter {name!r} .* has shape"):
            load(optimizer, {**whole, "state": {**whole["state"], name: short}})
    load(optimizer, whole)
    train(model, optimizer)


def test_a_loaded_state_does_not_choose_the_kernel() -> None:
    model, optimizer = made(OWN)
    train(model, optimizer)
    whole = optimizer.state_dict().wait()
    groups = [{**group, "fused": True} for group in whole["param_groups"][optimizer.stage]]
    load(optimizer, {**whole, "param_groups": {optimizer.stage: groups}})
    assert optimizer._optimizer is not None
    assert not optimizer._optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("kept", ["contiguous", "expanded"])
def test_a_fused_kernel_gets_state_with_the_strides_of_its_parameter(kept: str) -> None:
    """Files keep no strides, and the kernel uses only the strides of the parameter."""

    def laid_out() -> tuple[StageModel, StageOptimizer]:
        model, optimizer = made(FUSED)
        for parameter in optimizer._parameters:
            if parameter.dim() == 2:  # like channels-last, but in two dimensions
                parameter.data = parameter.data.t().contiguous().t()
        return model, optimizer

    def step(optimizer: StageOptimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in optimizer._parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step_now()

    model, optimizer = laid_out()
    step(optimizer, 1)
    found = copy.deepcopy(state(model, optimizer))
    for values in found.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = values[key].clone(memory_format=torch.contiguous_format)
            if kept == "expanded":
                values[key] = values[key].flatten()[0].expand(values[key].shape)
    other_model, other = laid_out()
    other_model.load_state_dict(model.state_dict())
    other.restore(found)
    for parameter, values in zip(other._parameters, found.state.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            loaded = other._optimizer.state[parameter][key]
            assert torch.equal(loaded, values[key])
            assert loaded.stride() == parameter.stride()
    for each in (optimizer, other):
        step(each, 2)
    if kept == "contiguous":
        assert str(state(other_model, other)) == str(state(model, optimizer))


def test_a_stage_that_was_frozen_starts_its_optimizer_and_its_scheduler_catches_up() -> None:
    model, optimizer = made(OWN)
    for _ in range(3):
        train(model, optimizer)
    was_frozen = replace(state(model, optimizer), groups=None, scheduler=None, state={})
    _, other = made(OWN)
    other.restore(was_frozen)
    assert other.steps == 3
    assert other._learning_rates() == optimizer._learning_rates()
    _, other = made(OWN, scheduler_interval="epoch")
    with pytest.raises(ConfigError, match="was frozen until step 3"):
        other.restore(was_frozen)
