"""Exports of a module, and what cannot be exported."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.splitting.exporting import arguments, export, flatten, plain, restore
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import split_module
from tests.support.splitmodules import rows
from tests.zoo import unsplit


def test_arguments_are_named_or_numbered() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    assert arguments(x) == (["0"], [x])
    assert arguments((x, y)) == (["0", "1"], [x, y])
    assert arguments({"a": x, "b": y}) == (["a", "b"], [x, y])
    with pytest.raises(ConfigError, match="input 'b' is int, not a tensor"):
        arguments({"a": x, "b": 3})


def test_outputs_are_restored_to_where_they_were() -> None:
    structure = {"dict": [["a", 1], [2, {"tuple": [0, None, {"list": [{"is": 0.5}, 1]}]}]]}
    assert restore(structure, ["x", "y"]) == {"a": "y", 2: ("x", None, [0.5, "y"])}


def test_what_cannot_be_exported_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as raised:
        export(unsplit.Branching(), rows(4, 8), training=True)
    text = str(raised.value)
    assert text.startswith("Branching cannot be exported for training: ")
    assert "unsplit.py" in text
    assert text.endswith("cut it by hand: give `layers` in [model], or stages with a `module` each")


def test_a_buffer_that_is_replaced_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replaces its buffer 'average'.*average\.copy_"):
        export(unsplit.Averaging(), rows(4, 8), training=True)


def test_gradients_are_recorded_whatever_the_caller_does() -> None:
    batch = {"tokens": torch.ones(2, 4, dtype=torch.int64)}
    with torch.no_grad():
        graph = export(unsplit.Language(), batch, training=True).program.graph
    assert any("wrap_with_set_grad_enabled" in str(node.target) for node in graph.nodes)


class Telling(torch.nn.Module):
    """Computes otherwise if it knows that it is exported; `needs` says whether it has to know."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.needs = needs

    def forward(self, x: Any) -> Any:
        if torch.compiler.is_exporting() and torch.compiler.is_compiling():
            return x * 2
        return x if not self.needs or float(x.sum()) > 0 else -x


@pytest.mark.parametrize(("needs", "operations"), [(False, 0), (True, 1)])
def test_a_module_is_followed_as_it_runs_unless_that_cannot_be(
    needs: bool, operations: int
) -> None:
    graph = export(Telling(needs), rows(4, 8), training=True).program.graph
    assert sum(node.op == "call_function" for node in graph.nodes) == operations
    assert not torch.compiler.is_exporting()


class Returning(torch.nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: Any) -> Any:
        return self.returned(x + 1)


class Cache:
    """As those of transformers, which a forward returns beside the logits."""


@pytest.mark.parametrize(
    "returned",
    [
        lambda x: {"y": x, "scale": 2.5, "kind": "mean", "on": True, "none": None},
        lambda x: [x, (x, [None, 3])],
        lambda x: {0: x, "length": x.shape[1]},
        lambda x: {"y": x, "width": x.unflatten(1, (4, -1)).shape[1]},
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_what_a_module_returns_keeps_its_form_its_numbers_and_its_texts(
    returned: Any, training: bool
) -> None:
    module = Returning(returned).train(training)
    layer = SplitLayer(split_module(module, torch.ones(3, 8)), 0, {}).train(training)
    for shape in ((3, 8), (5, 8), (5, 12)):
        assert str(layer(torch.ones(shape))) == str(module(torch.ones(shape)))


def test_a_cache_is_left_out_of_a_dict() -> None:
    module = Returning(lambda x: UserDict(y=x, cache=Cache()))
    structure = export(module, rows(4, 8), training=True).structure
    assert structure == {"dict": [["y", 0]]}


def test_a_module_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="the module returns Cache: it has to return tensors, nu"):
        export(Returning(lambda x: (x, Cache())), rows(4, 8), training=True)
    with pytest.raises(ConfigError, match="returns a dict with tuple as a key"):
        export(Returning(lambda x: {(1, 2): x}), rows(4, 8), training=True)


class Scaled(dict[str, Any]):
    """Outputs with a property, which no layer returns."""

    @property
    def scale(self) -> float:
        return 2.0


class Pair(NamedTuple):
    """Likewise."""

    first: Tensor
    second: int

    @property
    def both(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("value", "name"), [(Scaled(a=torch.ones(2)), "scale"), (Pair(torch.ones(2), 3), "both")]
)
def test_a_property_of_an_output_class_is_never_another_number(value: Any, name: str) -> None:
    found = plain(value)
    with pytest.raises(ConfigError, match=f"outputs.{name} is a property of a class"):
        getattr(found, name, 1.0)
    assert getattr(found, "other", 1.0) == 1.0
    if isinstance(value, tuple):
        assert (found.second, len(found)) == (3, 2)
        assert torch.equal(found[0], value[0])
    else:
        assert torch.equal(found["a"], value["a"])
    structure, values = flatten([value])
    assert restore(structure, values)[0] is not None
