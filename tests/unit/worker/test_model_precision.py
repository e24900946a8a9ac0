"""The gradient scaling and the precision of a stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from rpcmp.errors import ConfigError
from rpcmp.pipelining.assignment import assign
from rpcmp.worker import model as stage_model
from rpcmp.worker import optimizer
from rpcmp.worker.model import LossScale, StageModel
from rpcmp.worker.optimizer import StageOptimizer
from tests.support.graphs import chain_of
from tests.support.rounds import compute_thread, header

INFINITE = float("inf")


class Model(nn.Module):
    """Parameters of several types; one has a sparse gradient, and one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)
        self.single = nn.Parameter(torch.randn(1000))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self) -> Tensor:
        rows: Tensor = self.embedding(torch.tensor([1, 1, 4])).sum()
        return rows + self.single.sin().sum() + self.wide.sin().sum() + self.narrow.sin().sum()


def dense(model: nn.Module) -> list[Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.to_dense() if grad is not None else None for grad in found]


@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 3.7, 1.0])
@pytest.mark.parametrize("value", [None, INFINITE, -INFINITE, float("nan")])
def test_unscaled_gradients_equal_torchs_scaler(scale: float, value: float | None) -> None:
    torch.manual_seed(0)
    theirs = Model()
    ours = copy.deepcopy(theirs)
    scaler = GradScaler("cpu", init_scale=scale)
    inverse = torch.tensor(1 / torch.tensor(scale).item()).item()
    for model in (theirs, ours):
        scaler.scale(model()).backward()
        if value is not None and model.wide.grad is not None:
            model.wide.grad[3] = value
    sgd = torch.optim.SGD(theirs.parameters())
    scaler.unscale_(sgd)
    assert optimizer._unscale(ours.parameters(), inverse) is (value is None)
    for one, other in zip(dense(ours), dense(theirs), strict=True):
        assert one is other or torch.equal(
            one.nan_to_num(nan=7.0),  # type: ignore[union-attr]
            other.nan_to_num(nan=7.0),  # type: ignore[union-attr]
        )


def test_a_model_without_gradients_counts_as_finite() -> None:
    assert optimizer._unscale(Model().parameters(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**20])
def test_a_backward_starts_with_the_gradient_of_the_scaled_loss(
    dtype: torch.dtype, scale: float
) -> None:
    loss = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    GradScaler("cpu", init_scale=scale).scale(loss).backward()
    assert loss.grad is not None
    found = LossScale(scale).gradient(loss.detach())
    assert (found.dtype, found.item()) == (loss.grad.dtype, loss.grad.item())


def test_a_device_without_autocast_is_refused() -> None:
    with pytest.raises(ConfigError, match="autocast = 'bfloat16' is not available on meta: "):
        stage_model._autocast(torch.device("meta"), "bfloat16")


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return nn.functional.linear(nn.functional.linear(x, self.weight), self.weight)


def weighed_layers() -> dict[str, nn.Module]:
    return {"one": Weighed(), "two": Weighed()}


def casts(output: Tensor) -> int:
    """Return the number of casts of the layer's weight in the graph of `output`."""
    nodes, found = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        for user, _ in node.next_functions if node is not None else ():
            if user is None:
                continue
            nodes.append(user)
            variables = [v for v, _ in user.next_functions if hasattr(v, "variable")]
            if user.name().startswith("ToCopy") and variables:
                found.add(user)
    return len(found)


def test_a_weight_is_cast_once_per_layer_and_autocast_ends_with_the_layer() -> None:
    model_of = {"layers": f"{__name__}:weighed_layers"}
    config = chain_of(1, loss="torch.nn:MSELoss", model=model_of, autocast="bfloat16")
    model = StageModel(assign(config)[0])
    (work,) = header(1, 1, num_samples=2).microbatches([0])
    output = model.forward([torch.randn(2, 4)], work)
    assert output.dtype is torch.bfloat16
    assert all(value.dtype is torch.float32 for _, value in model.named_parameters())
    assert casts(output) == 2  # one per layer
    assert model.loss(output, torch.randn(2, 4), work).dtype is torch.float32
    with pytest.raises(ValueError, match="not a number"):
        model.forward([torch.full((2, 4), float("nan"))], work)
    assert not torch.is_autocast_enabled("cpu")


def test_a_parameter_whose_gradient_cannot_be_unscaled_is_named() -> None:
    model_of = {"layers": f"{__name__}:half_layers"}
    config = chain_of(1, loss="torch.nn:MSELoss", model=model_of, loss_scaling={})
    assignment = assign(config)[0]
    model = StageModel(assignment)
    compute = compute_thread(config.options.schedule)
    with pytest.raises(ConfigError, match=r"the parameter 'half\.weight' is float16, so"):
        StageOptimizer(model, assignment, compute, loss_scale=LossScale())


def half_layers() -> dict[str, nn.Module]:
    return {"half": nn.Linear(2, 2).half()}
