"""An optimizer that looks at all parameters at once is refused for several stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.config.types import OptimizerFactory
from rpcmp.errors import ConfigError
from rpcmp.pipelining.optimizer_parts import is_torchs_own, require_separable
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


def source(name: str, **more: Any) -> OptimizerFactory:
    return OptimizerFactory(callable=f"{__name__}:{name}", **more)


@pytest.mark.parametrize("name", ["GlobalNorm", "by_place"])
def test_what_depends_on_other_parameters_is_refused(name: str) -> None:
    kwargs = {"lr": 0.1} if name == "GlobalNorm" else {}
    with pytest.raises(ConfigError, match=rf"{name}' computes with all of its parameters at once"):
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


def test_torchs_own_need_not_be_tried() -> None:
    assert is_torchs_own(OptimizerFactory(callable="torch.optim:SGD"))
    assert not is_torchs_own(source("GlobalNorm"))
