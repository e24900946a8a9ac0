"""The optimizer of one stage, built as in a worker, and its state."""

from __future__ import annotations

from typing import Any

from rpcmp.checkpoint.stage_state import StageState
from rpcmp.config.loader import parse_config
from rpcmp.pipelining.assignment import assign
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer
from tests.support.rounds import compute_thread


def made(*stages: dict[str, Any], of: int = 0, **job: Any) -> tuple[StageModel, StageOptimizer]:
    """Return the model of one of these stages, and the optimizer that trains it."""
    data = {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.zoo.models:layers"}}
    config = parse_config({**data, "scheduler_interval": "step", **job, "stages": list(stages)})
    assignment = assign(config)[of]
    model = StageModel(assignment)
    compute = compute_thread(config.options.schedule)
    return model, StageOptimizer(model, assignment, compute)


def state(model: StageModel, optimizer: StageOptimizer) -> StageState:
    """Return the stage's current state."""
    return StageState(optimizer.steps, optimizer.stage, model.state_dict(), *optimizer.parts())
