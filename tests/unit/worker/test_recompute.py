"""Recomputed activations: none is kept, and gradients and buffers stay the same."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.pipelining import random_streams
from rpcmp.rpc.messages import StageOutputs
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.copies import Copies
from rpcmp.worker.recompute import Replay
from rpcmp.worker.state.forward_state import ForwardState
from rpcmp.worker.weight_grad import Splitter, WeightGradients
from tests.support import splitlayers

CPU = Copies(torch.device("cpu"))
SAMPLES, FEATURES, NUM_MICROBATCHES = 6, 4, 3

Forward = Callable[[list[Any]], Any]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install layers that split for one test."""
    splitlayers.install(monkeypatch)


class Running(nn.Module):
    """A layer that assigns to its buffers; one of them is None at first."""

    mean: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = self.mean if self.last is None else self.last + self.mean
        return x - self.mean - self.last


def model() -> nn.Sequential:
    """Return layers that a second forward could compute wrongly.

    The first layer changes its input in place.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReLU(inplace=True),
        Running(),
        nn.Linear(FEATURES, FEATURES),
        nn.BatchNorm1d(FEATURES),
        nn.Dropout(0.5),
        nn.Linear(FEATURES, FEATURES),
    )


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_MICROBATCHES, SAMPLES, FEATURES)
    return [x.requires_grad_() for x in torch.randn(shape, generator=generator)]


def seeded(module: nn.Module, number: int) -> Forward:
    def compute(inputs: list[Any]) -> Any:
        random_streams.seed_all(0, "train", 1, number, "layer")
        return module(*inputs)

    return compute


def begun(
    compute: Forward,
    received: Tensor,
    changing: ForwardState | None = None,
    splitter: Splitter | None = None,
) -> tuple[Replay, WeightGradients, Any]:
    """Run a first forward; return the micro-batch, its weight gradients and its outputs."""
    splitter = splitter or Splitter()
    weights = splitter.next_microbatch()
    changing = changing or ForwardState([])
    made = Replay(compute, [StageOutputs(received)], CPU, changing, splitter, weights)
    return made, weights, made.forward()


def state(module: nn.Module, received: list[Tensor]) -> dict[str, Tensor]:
    """Return parameters, buffers, and the gradients of parameters and inputs."""
    grads = {
        **{f"{name}.grad": parameter.grad for name, parameter in module.named_parameters()},
        **{f"received {number}": tensor.grad for number, tensor in enumerate(received)},
    }
    return module.state_dict() | {k: grad for k, grad in grads.items() if grad is not None}


def kept(module: nn.Module) -> dict[str, Tensor]:
    """Return the state after a plain stage has run all forwards before the first backward."""
    received = micro_batches()
    tapes = [LocalTape([StageOutputs(tensor)], CPU) for tensor in received]
    for number, tape in enumerate(tapes):
        tape.leave(seeded(module, number)([tape.inputs[0].clone()]))
    for tensor, tape in zip(received, tapes, strict=True):
        (tensor.grad,), _ = tape.backward([torch.ones(SAMPLES, FEATURES)])
    return state(module, received)


@pytest.mark.parametrize("splits", [False, True])
def test_recompute_changes_no_gradients_or_buffers(splits: bool) -> None:
    module, received = model(), micro_batches()
    expected = kept(copy.deepcopy(module))
    changing, splitter = ForwardState([("", module)]), Splitter()
    replays = [
        begun(seeded(module, number), tensor, changing, splitter)
        for number, tensor in enumerate(received)
    ]
    for tensor, (replay, weights, _) in zip(received, replays, strict=True):
        with weights.defer() if splits else contextlib.nullcontext():
            (tensor.grad,), _ = replay.backward([torch.ones(SAMPLES, FEATURES)])
        weights.accumulate()
    found = state(module, received)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_weight_gradients_of_the_second_forward_are_deferred() -> None:
    linear, splitter = nn.Linear(FEATURES, FEATURES), Splitter()
    late = []
    for tensor in micro_batches()[:2]:
        replay, weights, _ = begun(lambda inputs: linear(*inputs), tensor, splitter=splitter)
        with weights.defer():
            replay.backward([torch.ones(SAMPLES, FEATURES)])
        late.append(linear.weight.grad is None)
        weights.accumulate()
        linear.weight.grad = None
    assert late == [False, True]  # the first micro-batch calibrates the splitter


@pytest.mark.parametrize("recomputes", [True, False])
def test_no_activation_is_kept_between_forward_and_backward(recomputes: bool) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def compute(inputs: list[Any]) -> Tensor:
        activation = inputs[0].exp()
        seen.append(weakref.ref(activation))
        return torch.square(activation)

    (tensor, *_) = micro_batches()
    if recomputes:
        held = begun(compute, tensor)
        assert held[2].requires_grad
    else:
        tape = LocalTape([StageOutputs(tensor)], CPU)
        tape.leave(compute(tape.inputs))
    assert (seen[0]() is None) == recomputes


def test_only_buffers_that_a_forward_changes_are_copied() -> None:
    module = model()
    module.register_buffer("mask", torch.ones(1000))
    changing = ForwardState([("", module)])
    begun(seeded(module, 0), micro_batches()[0], changing)
    assert [copy.place.key for copy in changing.copy()] == [
        *("mean", "last"),
        *("running_mean", "running_var", "num_batches_tracked"),
    ]


def test_buffers_are_restored_after_a_failed_second_forward() -> None:
    module, forwards = model(), 0

    def compute(inputs: list[Any]) -> Any:
        nonlocal forwards
        forwards += 1
        outputs = module(*inputs)
        if forwards == 3:
            raise ValueError("planted")
        return outputs

    changing = ForwardState([("", module)])
    first, second = (begun(compute, tensor, changing)[0] for tensor in micro_batches()[:2])
    after = copy.deepcopy(dict(module.named_buffers()))
    with pytest.raises(ValueError, match="planted"):
        first.backward([torch.ones(SAMPLES, FEATURES)])
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, after[name]), name
    second.free()


def test_a_layer_that_differentiates_in_its_forward_is_refused() -> None:
    def compute(inputs: list[Any]) -> Any:
        (slope,) = torch.autograd.grad(inputs[0].exp().sum(), inputs)
        return slope

    with pytest.raises(RuntimeError, match="does not go with recompute = true"):
        begun(compute, micro_batches()[0])
