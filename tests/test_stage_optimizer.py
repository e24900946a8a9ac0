"""A stage's optimizer and scheduler, without other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp import plan
from rpcmp.configfile import parse
from rpcmp.errors import ConfigError
from rpcmp.schedule import policy
from rpcmp.snapshot.state import StageState
from rpcmp.worker.compute import ComputeThread
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer

OWN = {
    "optimizer": {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.5}},
    "scheduler": {"callable": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}},
}


def made(*stages: dict[str, Any], of: int = 0, **job: Any) -> tuple[StageModel, StageOptimizer]:
    """The optimizer of one of these stages, and the model that it trains."""
    data = {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.models:layers"}, **job}
    config = parse({**data, "stages": list(stages), "scheduler_interval": "step"})
    assignment = plan.assign(config)[of]
    model = StageModel(assignment)
    compute = ComputeThread(policy(config.schedule))
    return model, StageOptimizer(model, assignment, compute)


def state(model: StageModel, optimizer: StageOptimizer) -> StageState:
    """What the stage is now."""
    return StageState(optimizer.steps, optimizer.stage, model.state_dict(), *optimizer.parts())


def train(model: StageModel, optimizer: StageOptimizer) -> None:
    """One step."""
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


def test_an_optimizer_goes_on_where_another_of_its_kind_was() -> None:
    model, optimizer = made(OWN)
    train(model, optimizer)
    _, other = made(OWN)
    other.restore(state(model, optimizer))
    assert str(other.parts()) == str(optimizer.parts())


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    model, optimizer = made({})
    train(model, optimizer)
    _, other = made(OWN)
    with pytest.raises(ConfigError, match=r"'stage0' is another optimizer's than AdamW's.* betas"):
        other.restore(state(model, optimizer))


def test_a_stage_without_parameters_has_no_optimizer() -> None:
    model, optimizer = made({**OWN, "frozen": True})
    train(model, optimizer)
    assert optimizer.report is not None
    assert optimizer.report.learning_rate is None
    assert optimizer.parts() == ({}, None, None, None)
