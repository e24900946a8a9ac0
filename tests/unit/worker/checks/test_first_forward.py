"""The first forward of a training is checked once, and computes what others do."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.worker.checks.first_forward import FirstForward
from rpcmp.worker.checks.second_forward import TrialState
from rpcmp.worker.model import StageModel
from rpcmp.worker.state.forward_state import ForwardState
from tests.support.rounds import header
from tests.zoo.surprises import Auxiliary, Injecting, filled


class Model:
    """As much of a stage's model as a forward needs."""

    variables, is_cut = None, False
    hidden: ClassVar[dict[str, nn.Parameter]] = {}

    def __init__(self, module: nn.Module, compiles: bool = False) -> None:
        self.module, self.compiles = module, compiles

    def forward(self, inputs: list[Any], meta: MicrobatchMeta, eagerly: bool = False) -> Tensor:
        found: Tensor = self.module(*inputs)
        is_compiled = self.compiles and not eagerly
        return found.detach().requires_grad_() if is_compiled else found  # without their nodes

    def set_mode(self, training: bool) -> None:
        self.module.train(training)

    def named_parameters(self) -> Any:
        return self.module.named_parameters()

    def modules(self) -> Any:
        return self.module.modules()

    def forward_state(self) -> ForwardState:
        return ForwardState([("", self.module)])

    def trial_state(self) -> TrialState:
        return TrialState(self.forward_state(), dict(self.module.named_parameters()))


def first(kind: str, adds_up: bool = True, compiles: bool = False) -> FirstForward:
    model = cast(StageModel, Model(filled(Auxiliary(kind)), compiles))
    return FirstForward(model, [True], adds_up)


INPUT = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)


def meta(count: int) -> MicrobatchMeta:
    return MicrobatchMeta(header(1, count, step=1, num_samples=8 * count), 0, 8)


@pytest.mark.parametrize(("kind", "count"), [("scaled", 2), ("sum", 2), ("mean", 1)])
def test_what_adds_up_passes(kind: str, count: int) -> None:
    forward = first(kind)
    outputs = forward.forward([INPUT], meta(count))
    assert outputs.shape == (8, 4)
    assert forward.check(meta(count))


@pytest.mark.parametrize("compiles", [False, True])
def test_what_does_not_is_refused_unless_it_is_meant(compiles: bool) -> None:
    forward = first("mean", compiles=compiles)
    forward.forward([INPUT], meta(2))
    with pytest.raises(ConfigError, match=r"Injecting \(surprises.py:\d+\) adds a gradient"):
        forward.check(meta(2))
    meant = first("mean", adds_up=False)
    meant.forward([INPUT], meta(2))
    meant.check(meta(2))


def test_a_part_of_a_derivative_is_refused() -> None:
    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(x.sum(), x, create_graph=True)[0]

    forward = FirstForward(cast(StageModel, Model(Penalty())), [True], adds_up=True)
    with pytest.raises(ConfigError, match=r"asks torch.autograd.grad for the derivative"):
        forward.forward([INPUT], meta(2))


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_of_single_samples_two_are_compared(kind: str) -> None:
    forward, one = first(kind), MicrobatchMeta(header(1, 8, step=1, num_samples=8), 0, 1)
    forward.forward([INPUT[:1]], one)
    assert not forward.check(one)
    forward.forward([INPUT[1:2]], one)
    if kind == "sum":
        assert forward.check(one)
    else:
        with pytest.raises(ConfigError, match="adds a gradient"):
            forward.check(one)


def test_torchs_own_checkpoint_is_no_function_of_the_users(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = filled(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=True)

    forward = FirstForward(cast(StageModel, Model(Checkpointed())), [False], adds_up=True)
    forward.forward([INPUT], meta(2))
    assert forward.check(meta(2))
    assert not recwarn.list


def test_a_function_is_found_by_whatever_name_it_is_called() -> None:
    class Aliased(nn.Module):
        inject = staticmethod(Injecting.apply)

        def forward(self, x: Tensor) -> Any:
            return self.inject(x, x.mean())

    forward = FirstForward(cast(StageModel, Model(Aliased())), [False], adds_up=True)
    forward.forward([INPUT], meta(2))
    with pytest.raises(ConfigError, match=r"Injecting \(surprises.py:\d+\) adds a gradient"):
        forward.check(meta(2))
