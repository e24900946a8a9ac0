"""Values of many kinds are copied, put back, and go on in another process."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rpcmp.rpc.tensors import decode_tree, encode_tree
from rpcmp.worker.forward_state import ChangedAttributes, ForwardState, StateCopy
from rpcmp.worker.outer_variables import StatePlace

CPU = torch.device("cpu")


class Keeping(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: deque([1], maxlen=3), lambda value: value.append(2)),
        (lambda: {1}, lambda value: value.add(2)),
        (lambda: {7: [1.0]}, lambda value: value[7].append(2.0)),
        (lambda: Counter("a"), lambda value: value.update("ab")),
        (lambda: numpy.zeros(3), lambda value: value.__setitem__(1, 2.0)),
        (lambda: torch.Generator().manual_seed(1), lambda value: torch.rand(3, generator=value)),
        (lambda: random.Random(1), lambda value: value.random()),
        (lambda: numpy.random.RandomState(1), lambda value: value.rand()),
        (lambda: {1: {2}, "a": [1]}, lambda value: value["a"].append(2)),
        (lambda: torch.zeros(3).to(torch.float8_e5m2), lambda value: value.fill_(1.0)),
    ],
)
def test_values_of_many_kinds_are_put_back_and_kept(make: Any, change: Any) -> None:
    module, new = Keeping(make()), Keeping(make())
    attributes = ChangedAttributes([("layer.", module)], CPU)
    state = ForwardState([("layer.", module)])
    before = state.copy()
    change(module.value)
    assert [each.has_new_value for each in before] == [True]
    after = state.copy()
    state.put_back(before)
    assert not any(each.has_new_value for each in before)
    change(module.value)
    assert not any(each.has_new_value for each in after)
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(encode_tree(attributes.read(), tensors)))
    ChangedAttributes([("layer.", new)], CPU).restore(decode_tree(tree, tensors))
    there = StateCopy(StatePlace("", vars(new), "value"), new.value, after[0].content)
    assert not there.has_new_value
