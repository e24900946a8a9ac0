"""An optimizer that looks at all parameters at once is refused for several stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.config.types import Factory, OptimizerFactory
from rpcmp.errors import ConfigError
from rpcmp.pipelining.optimizer_parts import has_own, require_separable
from tests.zoo.surprises import GlobalNorm  # noqa: F401  # by its name here

STAGES = [{"a.weight": (8, 4), "a.bias": (8,)}, {}, {"b.weight": (1, 8), "b.bias": (1,)}]


class Noisy(torch.optim.SGD):
    """Draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(torch.randn_like(each))
        return super().step(closure)


class Closed(torch.optim.SGD):
    """Cannot step without a closure."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("a closure is needed")


def by_place(parameters: Any) -> torch.optim.Optimizer:
    """Rates that grow along the list."""
    groups = [{"params": [each], "lr": 0.1 * number} for number, each in enumerate(parameters, 1)]
    return torch.optim.SGD(groups, lr=0.1)


def by_shape(parameters: Any) -> torch.optim.Optimizer:
    """No decay of vectors."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for each in parameters:
        groups[each.dim() == 1]["params"].append(each)
    return torch.optim.AdamW(groups, weight_decay=0.1)


class ByMomentum(torch.optim.lr_scheduler.LRScheduler):
    """The rate falls with the mean size of all momenta."""

    def get_lr(self) -> list[float | torch.Tensor]:
        states = self.optimizer.state.values()
        sizes = [each["momentum_buffer"].abs().mean().item() for each in states]
        return [rate / (1 + sum(sizes) / max(1, len(sizes))) for rate in self.base_lrs]


class ByCount(torch.optim.lr_scheduler.LRScheduler):
    """The rate falls with the steps."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


def watching(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Watches the loss."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def source(name: str, **more: Any) -> OptimizerFactory:
    return OptimizerFactory(callable=f"{__name__}:{name}", **more)


@pytest.mark.parametrize("name", ["GlobalNorm", "by_place"])
def test_what_depends_on_other_parameters_is_refused(name: str) -> None:
    kwargs = {"lr": 0.1} if name == "GlobalNorm" else {}
    with pytest.raises(ConfigError, match=rf"{name}' computes with all parameters at once"):
        require_separable(source(name, kwargs=kwargs), STAGES)
    require_separable(source(name, kwargs=kwargs), STAGES[:2])  # one stage trains all


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("by_shape", {}), ("Noisy", {"lr": 0.1}), ("Closed", {"lr": 0.1}), ("missing", {})],
)
def test_what_looks_at_one_at_a_time_or_cannot_be_tried_passes(
    name: str, kwargs: dict[str, Any]
) -> None:
    state = torch.get_rng_state()
    require_separable(source(name, kwargs=kwargs), STAGES)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["ByMomentum", "ByCount", "watching"])
def test_a_scheduler_may_not_read_all_parameters_either(name: str) -> None:
    momentum = OptimizerFactory(
        callable="torch.optim:SGD", kwargs={"lr": 0.1, "momentum": 0.9, "nesterov": True}
    )
    schedule = Factory(callable=f"{__name__}:{name}")
    if name != "ByMomentum":
        require_separable(momentum, STAGES, schedule)
        return
    with pytest.raises(ConfigError, match=r"^scheduler = '.*ByMomentum' computes with all"):
        require_separable(momentum, STAGES, schedule)


def test_torchs_own_need_not_be_tried() -> None:
    sgd, schedule = "torch.optim:SGD", Factory(callable="torch.optim.lr_scheduler:StepLR")
    assert has_own(OptimizerFactory(callable=sgd), schedule) == []
    assert has_own(source("by_shape"), schedule) == [f"optimizer = '{__name__}:by_shape'"]
