"""Exports of a module, and what cannot be exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.errors import ConfigError
from rpcmp.splitting.exporting import arguments, export, restore
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
    structure = {"a": 1, "b": [0, None, {"c": 1}]}
    assert restore(structure, ["x", "y"]) == {"a": "y", "b": ("x", None, {"c": "y"})}


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


class Text(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x, "text"


class Notes(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return {"logits": x, "note": "text", "parts": (x,)}


def test_of_a_dict_what_is_no_tensor_is_left_out() -> None:
    """Such as a cache of transformers, which a forward returns beside the logits."""
    assert export(Notes(), rows(4, 8), training=True).structure == {"logits": 0, "parts": [1]}


def test_a_module_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="the module returns str: it has to return tensors, or"):
        export(Text(), rows(4, 8), training=True)
