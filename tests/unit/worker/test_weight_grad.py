"""Split backwards: they have the bits of plain ones, and defer weight gradients if possible.

Every model is trained twice on the same micro-batches: plainly, and as a stage that splits its
backwards. That stage does not split the first micro-batch, and adds each weight gradient after the
forward of the next micro-batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from rpcmp.worker import weight_grad
from rpcmp.worker.weight_grad import AccumulateGradHook, Splitter, WeightGradients, splittable

NUM_MICROBATCHES = 4

Loss = Callable[[Tensor], Tensor]
Found = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Replace the functions of torch.nn.functional for one test, and seed its random numbers."""
    torch.manual_seed(0)
    names = ("linear", *weight_grad.CONVOLUTIONS)
    originals = {name: getattr(F, name) for name in names}
    weight_grad.install()
    yield
    for name, original in originals.items():
        setattr(F, name, original)


class Late:
    """A record of the parameters that got their gradients after the stage's backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: set[str] = set()

    def accumulate(self, gradients: WeightGradients) -> None:
        """Add the deferred gradients, and record their parameters."""
        before = self._gradients()
        gradients.accumulate()
        after = self._gradients()
        self.names |= {name for name, grad in after.items() if not same(grad, before[name])}

    def _gradients(self) -> Found:
        pairs = self._model.named_parameters()
        return {name: None if p.grad is None else p.grad.clone() for name, p in pairs}


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether both have the same bits, or both are None."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def squares(output: Tensor) -> Tensor:
    """Return a loss with a dense gradient."""
    return (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape) + 0.1).pow(2).sum()


def train(model: nn.Module, inputs: list[Tensor], loss: Loss, late: Late | None) -> Found:
    """Return the gradients of all parameters and inputs; splits backwards if `late` is not None."""
    splitter, waiting = Splitter(), WeightGradients(frozenset())
    for number, value in enumerate(inputs):
        torch.manual_seed(number)
        gradients = splitter.next_microbatch()
        with gradients.watch() if late else contextlib.nullcontext():
            output = loss(model(value))
        if late:
            splitter.calibrate([output])
            late.accumulate(waiting)
        with gradients.defer() if late else contextlib.nullcontext():
            output.backward()
        waiting = gradients
    if late:
        late.accumulate(waiting)
    found: Found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"input {number}": value.grad for number, value in enumerate(inputs)}


def check(
    model: nn.Module,
    make_input: Callable[[int], Tensor],
    late: set[str],
    loss: Loss = squares,
    received: Sequence[bool] = (True, False),
) -> None:
    """Compare both ways to train `model`; exactly the parameters in `late` are late.

    This checks inputs with and without gradients, unless `received` selects one.
    """
    for is_received in received:

        def inputs(is_received: bool = is_received) -> list[Tensor]:
            values = [make_input(number) for number in range(NUM_MICROBATCHES)]
            return [value.requires_grad_(is_received) for value in values]

        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        found = Late(ours)
        expected = train(plain, inputs(), loss, None)
        actual = train(ours, inputs(), loss, found)
        assert {k: same(v, expected[k]) for k, v in actual.items()} == dict.fromkeys(expected, True)
        assert not any(grad is not None and grad.requires_grad for grad in actual.values())
        assert found.names == late


def random(*shape: int) -> Callable[[int], Tensor]:
    """Return random inputs of a shape per micro-batch."""
    return lambda number: torch.randn(*shape, generator=torch.Generator().manual_seed(number))


class Apply(nn.Module):
    """A module that calls a function with itself and its input."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, value: Tensor) -> Tensor:
        return self.function(self, value)


BOTH = {"weight", "bias"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(5,), (4, 5), (1, 5), (0, 5), (64, 129), (3, 2, 5), (8, 16, 65), (2, 2, 3, 5)],
    ids=str,
)
def test_a_linear_layer_of_inputs_of_any_dimension(shape: tuple[int, ...], bias: bool) -> None:
    late = {"weight", "bias"} if bias else {"weight"}
    check(nn.Linear(shape[-1], 33, bias=bias), random(*shape), late if 0 not in shape else set())


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("leading", [(6,), (1,), (2, 3)], ids=str)
def test_a_linear_layer_of_width_one(inputs: int, outputs: int, leading: tuple[int, ...]) -> None:
    check(nn.Linear(inputs, outputs), random(*leading, inputs), BOTH)


@pytest.mark.parametrize(
    "make_input",
    [
        lambda number: random(17, 24)(number).t(),
        lambda number: random(3, 17, 4)(number).transpose(1, 2),
        lambda number: random(1, 17)(number).expand(6, 17),
        lambda number: random(12, 34)(number)[::2, ::2],
        lambda number: random(5, 18)(number)[:, 1:].contiguous()[1:],
    ],
    ids=["transposed", "transposed in 3-d", "expanded", "strided", "not aligned"],
)
def test_a_linear_layer_of_inputs_with_any_strides(make_input: Callable[[int], Tensor]) -> None:
    layer = nn.Linear(17, 9)
    check(layer, lambda number: make_input(number).detach(), BOTH)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: y.sum(),
        lambda y: y.mean(dim=0).pow(2).sum(),
        lambda y: squares(y.t()),
        lambda y: squares(y.t().reshape(-1)),
        lambda y: squares(y[:, ::2]),
        lambda y: squares(y[0]),
    ],
    ids=["expanded", "expanded rows", "transposed", "copied", "strided", "a row"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_with_gradients_of_any_strides(loss: Loss, bias: bool) -> None:
    late = BOTH if bias else {"weight"}
    check(nn.Linear(17, 24, bias=bias), random(6, 17), late, loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_linear_layer_of_other_types(dtype: torch.dtype) -> None:
    layer = nn.Linear(17, 24, dtype=dtype)
    check(layer, lambda number: random(6, 17)(number).to(dtype), BOTH, lambda y: squares(y.float()))


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3), (5, 4, 11)),
    "1d, unbatched, no bias": (nn.Conv1d(4, 6, 3, bias=False), (4, 11)),
    "2d, strided": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (5, 4, 9, 8)),
    "2d, one sample, one channel": (nn.Conv2d(1, 1, 3), (1, 1, 5, 5)),
    "2d, grouped, dilated": (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (5, 4, 9, 9)),
    "2d, same": (nn.Conv2d(4, 6, 3, padding="same"), (5, 4, 9, 9)),
    "2d, circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 9, 9)),
    "3d": (nn.Conv3d(2, 3, 2), (5, 2, 4, 5, 4)),
    "1d, transposed": (nn.ConvTranspose1d(4, 6, 3, stride=2), (5, 4, 7)),
    "2d, transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (5, 4, 5, 5)),
    "3d, transposed": (nn.ConvTranspose3d(2, 3, 2, groups=1), (3, 2, 3, 4, 3)),
}


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(layer, random(*shape), {name for name, _ in layer.named_parameters()})


def test_a_convolution_of_channels_that_come_last() -> None:
    layer: nn.Module = nn.Conv2d(4, 6, 3)
    layer.to(memory_format=torch.channels_last)
    check(
        layer,
        lambda n: random(5, 4, 9, 9)(n).contiguous(memory_format=torch.channels_last),
        BOTH,
    )


# Whole models.


def test_a_cnn_with_batch_normalization_and_layers_in_place() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2)),
        *(nn.Linear(64, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)),
    )
    split_layers = {f"{index}.{name}" for index in (0, 3, 7, 9) for name in BOTH}
    check(model, random(6, 1, 8, 8), split_layers)


def attend(self: Any, value: Tensor) -> Tensor:
    return self.attention(value, value, value, need_weights=False)[0]  # type: ignore[no-any-return]


def test_attention() -> None:
    model = Apply(attend, attention=nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True))
    check(model, random(3, 5, 8), {name for name, _ in model.named_parameters()})


def test_cross_attention_uses_its_packed_weight_in_parts() -> None:
    model = Apply(
        lambda self, x: self.attention(x, x.flip(1), x.flip(1))[0],
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    check(model, random(3, 5, 8), {"attention.out_proj.weight", "attention.out_proj.bias"})


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=norm_first)
    names = {name for name, _ in layer.named_parameters() if "norm" not in name}
    check(layer, random(5, 3, 8), names)


def test_an_lstm_is_not_split_but_the_layer_after_it_is() -> None:
    model = Apply(
        lambda self, value: self.head(self.lstm(value)[0]), lstm=nn.LSTM(4, 6), head=nn.Linear(6, 2)
    )
    check(model, random(5, 3, 4), {"head.weight", "head.bias"})


# Layers that cannot be split, or only in part.


def square() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 6)


def test_a_layer_that_is_used_twice_is_not_split() -> None:
    model = Apply(
        lambda self, x: self.last(self.twice(self.twice(x).tanh())), twice=square(), last=square()
    )
    check(model, random(4, 6), {"last.weight", "last.bias"})


def test_a_layer_that_is_used_twice_in_later_micro_batches_is_then_not_split() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = square(), 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(1 if self.calls == 1 else 2):
                value = self.linear(value).tanh()
            return value

    check(Growing(), random(4, 6), set())


def test_tied_weights_are_not_split_but_their_biases_have_the_same_bits() -> None:
    first, last = square(), square()
    last.weight = first.weight
    check(nn.Sequential(first, nn.Tanh(), last), random(4, 6), set())


def test_a_weight_that_something_else_uses_as_well_is_not_split() -> None:
    model = Apply(lambda self, x: self.linear(x) + self.linear.weight.pow(2).sum(), linear=square())
    check(model, random(4, 6), set())
    table = nn.Embedding(11, 6)
    tied = Apply(
        lambda self, x: F.linear(self.table(x.long().abs() % 11), self.table.weight), table=table
    )
    check(tied, lambda number: random(4)(number) * 10, set(), received=[False])


def test_a_weight_that_is_itself_computed_is_not_split() -> None:
    model = parametrizations.weight_norm(square())
    check(model, random(4, 6), set())
    transposed = Apply(lambda self, x: F.linear(x, self.linear.weight.t()), linear=square())
    check(transposed, random(4, 6), set())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("layer", [nn.Linear(9, 5), nn.Conv1d(9, 5, 2)], ids=["linear", "conv"])
def test_a_frozen_parameter_gets_no_gradient(layer: nn.Module, frozen: str) -> None:
    layer = copy.deepcopy(layer)
    layer.get_parameter(frozen).requires_grad_(False)
    check(nn.Sequential(nn.Identity(), layer), random(4, 9, 9), {f"1.{(BOTH - {frozen}).pop()}"})


def test_a_layer_that_is_frozen_passes_gradients_on() -> None:
    first, frozen = square(), square().requires_grad_(False)
    check(nn.Sequential(first, frozen), random(4, 6), {"0.weight", "0.bias"})


def test_no_layer_is_split_under_autocast() -> None:
    def half(self: Any, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(value).float()  # type: ignore[no-any-return]

    check(Apply(half, linear=square()), random(4, 6), set())


def test_an_output_without_a_gradient_gives_its_layer_none() -> None:
    model = Apply(
        lambda self, x: self.used(x) + self.idle(x).detach(), used=square(), idle=square()
    )
    check(model, random(4, 6), {"used.weight", "used.bias"})


# Operations of users in a forward.


def test_a_gradient_inside_a_forward_equals_that_of_plain_autograd() -> None:
    def force(self: Any, value: Tensor) -> Tensor:
        with torch.enable_grad():
            position = value.detach().requires_grad_()
            energy = self.energy(position).pow(2).sum()
            (found,) = torch.autograd.grad(energy, position)
            (weight,) = torch.autograd.grad(self.energy(position).sum(), self.energy.weight)
        return self.head(value) * found + weight.sum()  # type: ignore[no-any-return]

    model = Apply(force, energy=square(), head=square())
    check(model, random(4, 6), {"head.weight", "head.bias"})


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_gradient_penalty_has_the_bits_of_a_plain_one(kind: str) -> None:
    layer = nn.Linear(6, 6) if kind == "linear" else nn.Conv1d(3, 3, 2)

    def penalized(self: Any, value: Tensor) -> Tensor:
        position = value if value.requires_grad else value.detach().requires_grad_()
        output = self.layer(position).tanh()
        (slope,) = torch.autograd.grad(output.sum(), position, create_graph=True)
        return self.last(output) + slope.pow(2).sum()  # type: ignore[no-any-return]

    last = nn.Linear(6, 6) if kind == "linear" else nn.Linear(5, 2)
    check(Apply(penalized, layer=layer, last=last), random(4, 3, 6), {"last.weight", "last.bias"})


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(3, 3, 2)], ids=["linear", "conv"])
def test_a_layer_that_is_split_can_be_differentiated_twice(layer: nn.Module) -> None:
    """Its weight is frozen, so the second gradient does not use trained parameters."""

    def penalized(self: Any, value: Tensor) -> Tensor:
        output = self.layer(value.tanh()).tanh()
        (slope,) = torch.autograd.grad(output.sum(), value, create_graph=True)
        return output.sum() + slope.pow(2).sum()  # type: ignore[no-any-return]

    layer = copy.deepcopy(layer)
    layer.get_parameter("weight").requires_grad_(False)
    check(Apply(penalized, layer=layer), random(4, 3, 6), {"layer.bias"}, received=[True])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(4, 4, 3, padding=1)], ids=str)
def test_a_layer_that_is_checkpointed_is_not_split(layer: nn.Module, use_reentrant: bool) -> None:
    model = Apply(
        lambda self, x: self.head(checkpoint(self.block, x, use_reentrant=use_reentrant)),
        block=nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1), square(), nn.Tanh()),
        head=square(),
    )
    check(model, random(4, 6), {"head.weight", "head.bias"}, received=[True])


def test_a_layer_that_is_checkpointed_here_and_not_there_is_not_split() -> None:
    for use_reentrant in (True, False):
        model = Apply(
            lambda self, x, reentrant: self.tied(
                checkpoint(self.tied, x, use_reentrant=reentrant).tanh()
            ),
            tied=square(),
        )
        model.function = functools.partial(model.function, reentrant=use_reentrant)
        check(model, random(4, 6), set(), received=[True])


def test_a_layer_whose_activations_are_kept_elsewhere_is_not_split() -> None:
    def offload(self: Any, value: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return self.linear(value)  # type: ignore[no-any-return]

    check(Apply(offload, linear=square()), random(4, 6), set())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(6, 6, 1)], ids=["linear", "conv"])
def test_hooks_of_a_parameter_fire_once_per_micro_batch(layer: nn.Module, kind: str) -> None:
    layer = copy.deepcopy(layer)
    seen: list[Tensor] = []
    for name in BOTH:
        getattr(layer.get_parameter(name), kind)(seen.append)
    inputs = [random(2, 6, 6)(number).requires_grad_() for number in range(NUM_MICROBATCHES)]
    train(layer, inputs, squares, Late(layer))
    assert len(seen) == 2 * NUM_MICROBATCHES
    assert all(isinstance(found, Tensor) for found in seen)


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(6, 6, 1)], ids=["linear", "conv"])
def test_an_accumulate_grad_hook_runs_at_deferred_additions_too(layer: nn.Module) -> None:
    """The hook does not prevent splitting either."""
    layer = copy.deepcopy(layer)
    plain = copy.deepcopy(layer)
    sums: list[float] = []
    for name in BOTH:
        parameter = layer.get_parameter(name)
        AccumulateGradHook(parameter, functools.partial(record_sum, sums, parameter))
    inputs = [random(2, 6, 6)(number).requires_grad_() for number in range(NUM_MICROBATCHES)]
    late = Late(layer)
    found = train(layer, inputs, squares, late)
    assert late.names == BOTH
    assert len(sums) == len(set(sums)) == 2 * NUM_MICROBATCHES  # each call saw another sum
    expected = train(plain, [value.detach().requires_grad_() for value in inputs], squares, None)
    assert all(same(found[name], expected[name]) for name in BOTH)


def record_sum(sums: list[float], parameter: Tensor) -> None:
    assert parameter.grad is not None
    sums.append(parameter.grad.sum().item())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_is_made_between_forward_and_backward_fires_in_the_backward(kind: str) -> None:
    layer = square()
    seen: list[Tensor] = []
    gradients = WeightGradients(frozenset(layer.parameters()))
    with gradients.watch():
        output = layer(torch.ones(2, 6)).sum()
    getattr(layer.weight, kind)(seen.append)
    with gradients.defer():
        output.backward()
    gradients.accumulate()
    assert same(layer.weight.grad, torch.full((6, 6), 2.0))
    assert len(seen) == 1


def test_a_hook_may_change_a_gradient() -> None:
    class Hooked(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            if not self.weight._backward_hooks:
                self.weight.register_hook(lambda grad: grad * 0.3)
            return super().forward(value)

    check(nn.Sequential(Hooked(6, 6), nn.Linear(6, 6)), random(4, 6), {"1.weight", "1.bias"})


# Functions of users.


@splittable
def scaled(value: Tensor, scale: Tensor, *, shift: Tensor, power: float = 1.0) -> Tensor:
    return (value * scale + shift).abs().pow(power)


def test_functions_with_tensors_by_position_and_by_keyword_are_split() -> None:
    model = Apply(
        lambda self, x: scaled(x, self.scale, power=2.0, shift=self.shift),
        scale=nn.Parameter(torch.linspace(1, 2, 6)),
        shift=nn.Parameter(torch.linspace(0, 1, 6)),
    )
    check(model, random(4, 6), {"scale", "shift"})


def test_a_function_that_reads_a_tensor_that_is_no_parameter_stays_whole() -> None:
    model = Apply(
        lambda self, x: scaled(self.linear(x), x.tanh(), shift=self.shift),
        linear=square(),
        shift=nn.Parameter(torch.zeros(6)),
    )
    check(model, random(4, 6), {"linear.weight", "linear.bias"}, received=[True])


def test_functions_are_unchanged_outside_a_stage_that_splits() -> None:
    assert scaled.__name__ == "scaled"
    assert F.linear.__name__ == "linear"
    output = F.linear(torch.ones(2, 6), square().weight)
    assert output.grad_fn is not None
    assert "Linear" not in type(output.grad_fn).__name__


def test_an_exception_in_a_forward_ends_watch() -> None:
    gradients = WeightGradients(frozenset())
    with pytest.raises(ValueError, match="planted"), gradients.watch():
        raise ValueError("planted")
    layer = square()
    layer(torch.ones(2, 6)).sum().backward()
    assert layer.weight.grad is not None


def test_no_gradient_is_deferred_after_accumulate() -> None:
    layer = square()
    gradients = WeightGradients(frozenset(layer.parameters()))
    with gradients.watch():
        output = layer(torch.ones(2, 6)).sum()
    with gradients.defer():
        output.backward()
    assert layer.weight.grad is None
    gradients.accumulate()
    gradients.accumulate()
    assert same(layer.weight.grad, torch.full((6, 6), 2.0))


def test_scripted_modules_find_the_operators_of_torch() -> None:
    """The contract with torch: it looks functions up by their id in a table of builtins."""

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 2)
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.conv(x).mean(-1), self.linear.weight, self.linear.bias)

    plain = Scripted()
    x = torch.randn(4, 2, 5)
    scripted: Callable[[Tensor], Tensor] = torch.jit.script(plain)
    assert torch.equal(scripted(x), plain(x))
