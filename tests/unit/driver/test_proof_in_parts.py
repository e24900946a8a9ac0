"""A module that is too large to be compared as a whole is compared part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from rpcmp.driver.proof_in_parts import prove_in_parts
from rpcmp.errors import ConfigError
from rpcmp.splitting.recording import PartCall, recorded
from rpcmp.splitting.split import split_module
from tests.zoo import surprises
from tests.zoo.surprises import Clipped, Scaled


def proven(
    module: nn.Module,
    *inputs: Tensor,
    fits: Callable[[nn.Module], bool],
    seconds: float = 20.0,
) -> list[str]:
    with recorded(module) as recording:
        split_module(module, inputs)

    def fitting(part: nn.Module, call: PartCall) -> bool:
        return part is not module and fits(part)

    return prove_in_parts(module, recording, (7, 5), fitting, None, seconds)


def of_surprises(kind: str) -> list[str]:
    x = torch.ones(3, 4, dtype=torch.float64)
    return proven(surprises.Net(kind), x, fits=lambda part: True)


@pytest.mark.parametrize("kind", ["", "swish", "cache", "hook of a parameter"])
def test_parts_that_are_cut_as_they_are_pass(kind: str) -> None:
    assert of_surprises(kind) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("scaled", r"^Net: 'blocks.1' \(Block\) computes something else in layers"),
        ("clipped", r"lost in a cut: Clipped \(surprises.py:"),
        ("pulling", r"lost in a cut: Pulling \(surprises.py:"),
        ("hook of a module", r"hooks of gradients, which its layers lose: blocks.1 \(Block\)"),
        ("hook of a tensor", r"puts hooks on tensors, which its layers lose: surprises.py:"),
        ("random", "draws from Python's random"),
        ("numpy", "draws from numpy.random"),
        ("generator", "draws from blocks.1.noise"),
        ("counter", r"changes part.calls in each forward"),
        ("late counter", r"changes part.calls in each forward"),
        ("global counter", r"changes tests.zoo.surprises.CALLS in each forward"),
        ("reentrant", r"use_reentrant=True: set use_reentrant=False"),
    ],
)
def test_what_a_cut_would_lose_is_refused_with_the_part_it_is_in(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        of_surprises(kind)


class Odd(nn.Module):
    """A part with masks, positions, flags and a cache that it can do without."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, 4), function

    def forward(
        self, x: Tensor, mask: Tensor, *, place: tuple[Tensor, Tensor], cache: Any, scale: float
    ) -> Tensor:
        cosine, index = place
        y = self.inner(x).masked_fill(mask, 0.0) * cosine * scale + index[:, None]
        found: Tensor = self.function.apply(y) if self.function else y
        return found


class Large(nn.Module):
    def __init__(self, function: Any = None, in_last: Any = None, between: Any = None) -> None:
        super().__init__()
        self.embed, self.between = nn.Embedding(8, 4), between
        self.layers = nn.ModuleList([Odd(function), Odd(function), Odd(in_last or function)])

    def forward(self, tokens: Tensor) -> Tensor:
        x, index = self.embed(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        mask = (tokens == 0)[:, :, None]
        for layer in self.layers:
            place = (torch.cos(index)[:, None], index)
            x = layer(x, mask, place=place, cache=object(), scale=0.5)
        found: Tensor = self.between.apply(x) if self.between else x
        return found


class Counting(Large):
    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens)


TOKENS = torch.arange(21).reshape(3, 7) % 8


def test_parts_are_called_as_in_the_module() -> None:
    assert proven(Large(), TOKENS, fits=lambda part: True) == []
    with pytest.raises(ConfigError, match=r"Large: 'layers.0' \(Odd\) .* gradient of 'input_2'"):
        proven(Large(Scaled).requires_grad_(False), TOKENS, fits=lambda part: True)


def test_a_function_is_found_in_one_of_many_like_parts_and_between_them() -> None:
    with pytest.raises(ConfigError, match=r"Large: 'layers.2' \(Odd\) .*: Clipped \("):
        proven(Large(in_last=Clipped), TOKENS, fits=lambda part: True)
    with pytest.raises(ConfigError, match=r"Function outside of the parts .* Clipped .* a module"):
        proven(Large(between=Clipped), TOKENS, fits=lambda part: True)


def test_parts_that_are_too_large_themselves_are_told() -> None:
    assert proven(Large(), TOKENS, fits=lambda part: False) == ["layers.0", "layers.1", "layers.2"]


def test_numbers_that_change_between_the_parts_are_told() -> None:
    found = proven(Counting(), TOKENS, fits=lambda part: True)
    assert found == ["calls, which a forward changes"]


class Pair(nn.Module):
    """What returns something that no cut can, but consists of parts that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Odd()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs), object()


class Pairs(Large):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            mask, place = x > 0, (x[:1], torch.ones(x.shape[1]))
            x, _ = layer(x, mask, place=place, cache=None, scale=1.0)
        found: Tensor = x
        return found


def test_of_a_part_that_cannot_be_cut_alone_its_own_parts_are_compared() -> None:
    tried: list[type] = []

    def fits(part: nn.Module) -> bool:
        tried.append(type(part))
        return True

    assert proven(Pairs(), TOKENS, fits=fits) == []
    assert tried == [Pair, Odd, Pair, Odd]


def test_weights_are_only_there_while_a_part_is_compared() -> None:
    module = Large()
    before = {name: each.data_ptr() for name, each in module.named_parameters()}
    proven(module, TOKENS, fits=lambda part: True)
    assert before == {name: each.data_ptr() for name, each in module.named_parameters()}
    assert all(each.grad is None for each in module.parameters())


clip = Clipped.apply


class Aliasing(Large):
    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = clip(super().forward(tokens))
        return found


class ByScale(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class Scaling(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = ByScale.apply(self.inner(x), self.scale)
        return found


class Several(nn.Module):
    def __init__(self, *scales: float, between: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Scaling, scales))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = ByScale.apply(x, self.between) if self.between else x
        return found


def test_a_function_by_another_name_is_found() -> None:
    with pytest.raises(ConfigError, match=r"Function outside of the parts .* Clipped .* a module"):
        proven(Aliasing(), TOKENS, fits=lambda part: True)


def test_parts_with_functions_and_other_settings_are_all_compared() -> None:
    x = torch.ones(3, 4)
    assert proven(Several(1.0, 1.0), x, fits=lambda part: True, seconds=0.0) == []
    with pytest.raises(ConfigError, match=r"'layers.2' \(Scaling\) .* ByScale"):
        proven(Several(1.0, 1.0, 0.1), x, fits=lambda part: True, seconds=0.0)
    with pytest.raises(ConfigError, match="Function outside of the parts"):
        proven(Several(1.0, 1.0, between=0.1), x, fits=lambda part: True)


GLOBAL = torch.Generator().manual_seed(0)


class Splitting(Large):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()
        self.head = nn.TransformerEncoderLayer(4, 1, 4, activation=Scaled.apply)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(super().forward(tokens))
        return found


def test_generators_do_not_end_an_export_and_functions_in_torchs_parts_count() -> None:
    module = Splitting()
    with recorded(module) as recording:
        split_module(module, TOKENS)
    assert recording.unseen == ""
    with pytest.raises(ConfigError, match=r"'head' \(TransformerEncoderLayer\) .* Scaled"):
        proven(module, TOKENS, fits=lambda part: True)


class Demanding(Large):
    """Parts whose Functions cannot do with gradients that are drawn."""

    def __init__(self) -> None:
        super().__init__(Refusing)


class Refusing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("not such a gradient")


def test_a_part_that_fails_by_itself_is_told_not_raised() -> None:
    with pytest.raises(ConfigError, match="Function outside of the parts that can be compared"):
        proven(Demanding(), TOKENS, fits=lambda part: True)
