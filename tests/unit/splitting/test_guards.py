"""Conditions on the sizes of a module's inputs, under which it was cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.splitting import guards
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import split_module
from tests.zoo import unsplit


def layers(x: Tensor) -> list[SplitLayer]:
    module = unsplit.Sized()
    split = split_module(module, {"x": x, "y": x.clone()})
    tensors = dict(module.named_parameters())
    return [SplitLayer(split, index, tensors) for index in range(len(split.layers))]


def test_other_branches_than_those_that_were_followed_are_refused() -> None:
    """It was exported with a length above 6 that is even, and one of both inputs."""
    first, second = layers(torch.ones(3, 8, 4))

    def run(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = second(first({"x": x, "y": y}))
        return result

    assert run(torch.ones(5, 10, 4), torch.ones(5, 10, 4)).shape == (5, 10, 4)
    for length, text in ((6, r"x\.shape\[1\] > 6"), (9, r"x\.shape\[1\] % 2")):
        with pytest.raises(
            ValueError, match=rf"cut for inputs with \(?{text}.*not for \[3, {length}"
        ):
            run(torch.ones(3, length, 4), torch.ones(3, length, 4))
    with pytest.raises(ValueError, match=r"x\.shape\[1\] == y\.shape\[1\]"):
        run(torch.ones(3, 8, 4), torch.ones(3, 1, 4))


def test_conditions_of_torch_are_evaluated() -> None:
    shapes = [[3, 8], [4, 8, 2]]
    for code, expected in {
        "L['leaves'][0].size()[1] > 6": True,
        "(L['leaves'][0].size()[1] % 3) == 0": False,
        "L['leaves'][0].size()[1] == 2*L['leaves'][1].size()[0]": True,
        "not (min(1, L['leaves'][1].size()[2] // 4) < 1)": False,
        "-1 + L['leaves'][0].size()[0] <= 2 and L['leaves'][0].size()[0] / 2 == 1.5": True,
        "2 < L['leaves'][0].size()[0] < 4 or max(1, 2) == 1": True,
    }.items():
        assert guards.holds(guards.from_torch(code), shapes) is expected, code


@pytest.mark.parametrize(
    "code",
    [
        "L['leaves'][0].stride()[1] == 1",
        "__import__('os').system('true') == 0",
        "size(0, 1) ** 99999 == 0",
        "[1][0] == 1",
        "lambda: 0",
        "size(0,",
    ],
)
def test_nothing_else_is_understood(code: str) -> None:
    with pytest.raises(ConfigError, match="asks its inputs something that no host can see to"):
        guards.from_torch(code)
    with pytest.raises(ValueError, match="is no"):
        guards.holds(code, [[1, 2]])


@pytest.mark.parametrize("guard", ["size(0, 0) % 0 == 0", "(" * 5000, "-" * 3000 + "1"])
def test_a_condition_without_end_or_value_is_none(guard: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        guards.holds(guard, [[1]])


def test_an_input_that_does_not_exist_is_no_condition() -> None:
    with pytest.raises(ValueError, match="is no condition"):
        guards.holds("size(7, 0) == 1", [[1]])


def test_torch_lists_all_conditions() -> None:
    """Relies on a private name of torch: `ExportedProgram._guards_code`."""
    from rpcmp.splitting.exporting import export

    x = torch.ones(3, 8, 4)
    found = export(unsplit.Sized(), {"x": x, "y": x.clone()}, training=True).guards
    assert {
        "L['leaves'][0].size()[1] > 6",
        "(L['leaves'][0].size()[1] % 2) == 0",
        "L['leaves'][0].size()[0] == L['leaves'][1].size()[0]",
    } <= set(found)
