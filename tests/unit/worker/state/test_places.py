"""What modules keep in objects, lists and modules that they hide is found."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.rpc.tensors import decode_tree, encode_tree
from rpcmp.worker.state.forward_state import ChangedAttributes, ForwardState
from rpcmp.worker.state.places import hidden_parameters, parts_of
from rpcmp.worker.state.values import is_equal, is_plain, plain_of

CPU = torch.device("cpu")


class Holding(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Schedule:
    """What a layer may call, and no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


@pytest.mark.parametrize(
    ("value", "call"),
    [
        (itertools.count(3, 2), lambda value: next(value.value)),
        (Schedule(), lambda value: value.value()),
        ([Schedule(), "a"], lambda value: value.value[0]()),
        ({"b": (Schedule(),)}, lambda value: value.value["b"][0]()),
        ([nn.BatchNorm1d(2)], lambda value: value.value[0](torch.ones(3, 2)).sum()),
    ],
)
def test_what_objects_within_keep_is_put_back_and_kept(value: Any, call: Any) -> None:
    module, new = Holding(copy.deepcopy(value)), Holding(copy.deepcopy(value))
    attributes = ChangedAttributes([("layer.", module)], CPU)
    state = ForwardState([("layer.", module)])
    before = state.copy()
    call(module)
    assert any(each.has_new_value for each in before)
    state.put_back(before)
    assert not any(each.has_new_value for each in before)
    call(module)
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(encode_tree(attributes.read(), tensors)))
    ChangedAttributes([("layer.", new)], CPU).restore(decode_tree(tree, tensors))
    there = {each.place.name: each.content for each in ForwardState([("layer.", new)]).copy()}
    for each in (one for one in state.copy() if is_plain(one.value)):
        assert is_equal(plain_of(each.content), plain_of(there[each.place.name]))


def test_a_parameter_that_a_list_hides_is_found_but_not_one_that_the_layer_has() -> None:
    module = Holding([])
    module.inner = nn.Linear(2, 2)
    module.value += [module.inner, {"a": nn.Linear(2, 2, bias=False)}]
    assert [*hidden_parameters(parts_of([("layer.", module)]), ())] == ["layer.value.1.a.weight"]


def test_loggers_and_modules_are_no_state() -> None:
    module = Holding([])
    vars(module).update(logger=logging.getLogger("odd"), library=math)
    assert {each.place.name for each in ForwardState([("", module)]).copy()} == {"value"}
