"""The reference of `rpcmp verify`, and the comparison with it: both must notice errors.

Errors are planted into one of two runs of the reference; the comparison must find each of them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.data.batches import Batches
from rpcmp.pipelining import assignment, layers, random_streams
from rpcmp.tools.reference_model import UnsplitModel
from rpcmp.tools.verification import ComparedRun, first_difference
from tests.support.minibatches import load_batches
from tests.support.nearness import assert_near

ONE, ONE_DIFFERS = torch.ones(1), "a: 1 of 1 numbers differ, the first at"
STEPS = 5  # more than one epoch of 3 mini-batches; the last one is smaller


def job(dropout: float = 0.0, **changed: Any) -> Config:
    """Return a job with the layers and the data of tests.zoo.models."""
    layers = {"layers": "tests.zoo.models:layers", "kwargs": {"dropout": dropout}}
    samples = {"callable": "tests.zoo.models:dataset", "kwargs": {"samples": 26}}
    return parse_config(
        {
            "loss": "torch.nn:MSELoss",
            "num_microbatches": 4,
            "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}},
            "model": {**layers, "num_stages": 2},
            "data": {"train": samples, "batch_size": 10},
            **changed,
        }
    )


def batches(config: Config) -> Batches:
    assert config.data is not None
    return load_batches(config.data.train, "data.train", config.data, config.seed, training=True)


def train(
    config: Config, kind: type[UnsplitModel] = UnsplitModel, steps: int = STEPS
) -> ComparedRun:
    """Run all steps in this process."""
    model = kind(config, {part.stage_name: part.layers for part in assignment.assign(config)})
    return ComparedRun(list(model.train(batches(config), steps)), model.state_dict())


@pytest.fixture(scope="module")
def right() -> ComparedRun:
    """Return a run without errors."""
    return train(job())


# Runs that must be equal.


@pytest.mark.parametrize("changed", [{}, {"dropout": 0.5}, {"max_grad_norm": 0.1}])
def test_the_same_run_twice_is_identical(changed: dict[str, Any]) -> None:
    assert first_difference(train(job(**changed)), train(job(**changed))) is None


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_every_balance_trains_the_same(right: ComparedRun, balance: list[int]) -> None:
    model = {"layers": "tests.zoo.models:layers", "balance": balance}
    assert first_difference(train(job(model=model)), right) is None


def test_not_a_number_equals_itself() -> None:
    run = ComparedRun([float("nan")], {"w": torch.tensor([float("nan"), 1.0])})
    assert first_difference(run, run) is None


# Errors that must be found.


class LosesAGradient(UnsplitModel):
    """A model that drops the gradient of one micro-batch of the last step, but not its loss."""

    def _micro_batch(self, inputs: Any, targets: Any, step: int, index: int, share: float) -> float:
        if (step, index) != (STEPS, 2):
            return super()._micro_batch(inputs, targets, step, index, share)
        before = [parameter.grad.clone() for parameter in self.parameters()]  # type: ignore[union-attr]
        loss = super()._micro_batch(inputs, targets, step, index, share)
        for parameter, grad in zip(self.parameters(), before, strict=True):
            parameter.grad = grad
        return loss


class DropsAMicroBatch(UnsplitModel):
    """A model that leaves out one micro-batch of the second step."""

    def _micro_batch(self, inputs: Any, targets: Any, step: int, index: int, share: float) -> float:
        if (step, index) == (2, 1):
            return 0.0
        return super()._micro_batch(inputs, targets, step, index, share)


class SumsInReverse(UnsplitModel):
    """A model that computes the micro-batches from the last to the first."""

    def _slices(self, batch: Any) -> list[Any]:
        return super()._slices(batch)[::-1]


class ForgetsToClear(UnsplitModel):
    """A model that adds gradients of the first step to the gradients of the second step."""

    def _step(self, inputs: Any, targets: Any, step: int) -> float:
        loss = super()._step(inputs, targets, step)
        if step == 1:
            for parameter in self.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
        return loss


def require_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(found[name], value)


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (DropsAMicroBatch, "step 2: loss "),
        (LosesAGradient, "after the last step: first.0.bias: 6 of 6 numbers differ"),
        (ForgetsToClear, "step 3: loss "),
    ],
)
def test_a_planted_error_is_found_where_it_shows_first(
    right: ComparedRun, kind: type[UnsplitModel], first: str
) -> None:
    found = first_difference(train(job(), kind), right)
    assert found is not None
    assert found.startswith(first)


def test_another_order_of_sums_is_found(right: ComparedRun) -> None:
    wrong = train(job(), SumsInReverse)
    assert first_difference(wrong, right) is not None
    require_near(wrong.state, right.state)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"seed": 1}, "step 1: loss "),
        ({"dropout": 0.5}, "step 1: loss "),
        ({"max_grad_norm": 0.01}, "step 2: loss "),
        ({"loss": "torch.nn:L1Loss"}, "step 1: loss "),
    ],
)
def test_another_config_is_found(right: ComparedRun, changed: dict[str, Any], first: str) -> None:
    found = first_difference(train(job(**changed)), right)
    assert found is not None
    assert found.startswith(first)


def with_bit_flipped(state: dict[str, Tensor], name: str, index: int) -> dict[str, Tensor]:
    """Return a copy of `state` with the last bit of one number changed."""
    changed = {key: value.clone() for key, value in state.items()}
    changed[name].view(-1).view(torch.int32)[index] ^= 1
    return changed


@pytest.mark.parametrize(
    ("name", "index", "place"),
    [("first.0.weight", 9, "[2, 1]"), ("middle.0.bias", 5, "[5]"), ("last.bias", 0, "[0]")],
)
def test_a_flipped_bit_is_found_at_its_index(
    right: ComparedRun, name: str, index: int, place: str
) -> None:
    wrong = ComparedRun(right.losses, with_bit_flipped(right.state, name, index))
    numbers = right.state[name].numel()
    found = first_difference(wrong, right)
    assert found is not None
    assert found.startswith(
        f"after the last step: {name}: 1 of {numbers} numbers differ, the first at {place}: "
    )
    ours, theirs = (run.state[name].view(-1)[index].item() for run in (wrong, right))
    assert found.endswith(f": {ours!r} pipelined, {theirs!r} in one process")


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([1.0], [1.0, 2.0], "1 steps pipelined, 2 in one process"),
        ([0.0], [-0.0], "step 1: loss 0.0 pipelined, -0.0 in one process"),
        ([1.0, float("nan")], [1.0, 2.0], "step 2: loss nan pipelined, 2.0"),
    ],
)
def test_other_differences_of_losses_are_named(
    ours: list[float], theirs: list[float], message: str
) -> None:
    found = first_difference(ComparedRun(ours, {}), ComparedRun(theirs, {}))
    assert found is not None
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("ours", "name", "theirs", "message"),
    [
        (ONE, "b", ONE, "only one of .* has a, b"),
        (ONE, "a", torch.ones(1, 1), r"a: torch.float32\[1\] pipelined, torch.float32\[1, 1\]"),
        (ONE, "a", ONE.double(), r"a: torch.float32\[1\] pipelined, torch.float64\[1\]"),
        (0 * ONE, "a", -0.0 * ONE, rf"{ONE_DIFFERS} \[0\]: 0.0 pipelined, -0.0"),
        (torch.tensor(3), "a", torch.tensor(4), rf"{ONE_DIFFERS} \[\]: 3 pipelined, 4"),
        (torch.empty(0, 2), "a", torch.empty(2, 0), r"float32\[0, 2\] pipelined, .*\[2, 0\]"),
    ],
)
def test_other_differences_of_tensors_are_named(
    ours: Tensor, name: str, theirs: Tensor, message: str
) -> None:
    run = ComparedRun([], {"a": ours})
    assert first_difference(run, ComparedRun([], {"a": ours.clone()})) is None
    found = first_difference(run, ComparedRun([], {name: theirs}))
    assert found is not None
    assert re.search(message, found)


# The reference itself, against plain PyTorch on whole mini-batches.


def train_plainly(config: Config, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the state of an ordinary training loop without micro-batches."""
    built = layers.build_layers(config, 0, layers.chain_layers(config))
    model = nn.Sequential()
    for name, layer in built.items():
        model.add_module(name, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    order = batches(config)
    mini_batches = [pair for epoch in range(1, steps + 1) for pair in order.epoch(epoch)]
    for inputs, targets in mini_batches[:steps]:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 100])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_micro_batches_add_up_to_the_whole_mini_batch(
    num_microbatches: int, max_grad_norm: float | None
) -> None:
    config = job(num_microbatches=num_microbatches, max_grad_norm=max_grad_norm)
    run = train(config)
    losses, state = train_plainly(config, STEPS)
    assert run.losses == pytest.approx(losses, rel=1e-5, abs=1e-7)
    require_near(run.state, state)


def test_a_loss_that_sums_over_samples_needs_no_weights() -> None:
    loss = {"callable": "torch.nn:MSELoss", "kwargs": {"reduction": "sum"}}
    optimizer = {"callable": "torch.optim:SGD", "kwargs": {"lr": 1e-3}}
    cut, whole = (
        train(job(loss=loss, optimizer=optimizer, num_microbatches=count)) for count in (4, 1)
    )
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5, abs=1e-7)
    require_near(cut.state, whole.state)


def test_dropout_is_drawn_for_each_micro_batch_and_layer() -> None:
    config = job(dropout=0.5, num_microbatches=2)
    first, middle, last = layers.build_layers(config, 0, layers.chain_layers(config)).values()
    expected = 0.0
    batch = next(batches(config).epoch(1))
    slices = zip(*(tensor.tensor_split(2) for tensor in batch), strict=True)
    for index, (inputs, targets) in enumerate(slices):
        random_streams.seed_all(0, "train", 1, index, "middle")
        hidden = middle(first(inputs))
        expected += nn.functional.mse_loss(last(hidden), targets).item() / 2
    assert train(config, steps=1).losses == pytest.approx([expected])


def test_stages_read_the_inputs_of_the_graph() -> None:
    linear = {"module": "torch.nn:Linear", "kwargs": {"in_features": 2, "out_features": 1}}
    split = {"module": "tests.zoo.models:Split", "kwargs": {"features": 4}}
    config = job(
        model=None,
        stages=[
            {
                "name": "sum",
                "module": "tests.zoo.models:Sum",
                "inputs": ["a", "b", "a", "target"],
            },
            {"name": "a", "inputs": ["split.left"], **linear},
            {"name": "b", "inputs": ["split.others.0"], **linear},
            {"name": "split", "inputs": ["input"], **split},
        ],
    )
    names = config.stage_names
    _, a, b, first = (layers.build_layers(config, i, [name])[name] for i, name in enumerate(names))
    inputs, targets = next(batches(config).epoch(1))
    halves = first(inputs)
    outputs = 2 * a(halves["left"]) + b(halves["others"][0]) + targets
    expected = nn.functional.mse_loss(outputs, targets).item()
    assert train(config, steps=1).losses == pytest.approx([expected])


def test_a_frozen_layer_does_not_change() -> None:
    config = job(stages=[{"frozen": True}, {}], model={"layers": "tests.zoo.models:layers"})
    (first, *_) = assignment.assign(config)
    built = layers.build_layers(config, 0, first.layers)["first"].state_dict()
    trained = train(config).state
    assert all(torch.equal(trained[f"first.{name}"], value) for name, value in built.items())
    assert not torch.equal(trained["first.0.bias"], train(job()).state["first.0.bias"])
