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
from rpcmp.worker.state.forward_state import ChangedAttributes, ForwardState, StateCopy
from rpcmp.worker.state.outer_variables import StatePlace

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


def test_a_cache_by_shape_and_a_sparse_tensor_are_named_and_do_not_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Keeping({})
    attributes = ChangedAttributes([("layer.", module)], CPU)
    module.value[(3, torch.float32)] = torch.ones(3)
    assert attributes.read() == {}
    assert "where it keeps a dict whose keys are no texts or integers" in caplog.text
    module.value = torch.eye(3).to_sparse()
    assert attributes.read() == {}
    assert module.value.layout is torch.sparse_coo


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.ones(1).expand(4), lambda value: None),
        (numpy.broadcast_to(numpy.ones(1), (4,)), lambda value: None),
        (torch.ones(2), lambda value: value.resize_(4).fill_(2)),
        (torch.eye(2).to_sparse(), lambda value: value.zero_()),
        (bytearray(b"ab"), lambda value: value.append(1)),
        ([{"q": deque([1], maxlen=2)}, {3}], lambda value: value[0]["q"].extend([2, 3])),
    ],
)
def test_values_that_cannot_be_written_to_as_they_are_are_put_back(value: Any, change: Any) -> None:
    module = Keeping(value)
    state = ForwardState([("layer.", module)])
    before = state.copy()
    change(value)
    state.put_back(before)
    assert module.value is value
    assert not any(each.has_new_value for each in before)
    module.value = "another"
    state.put_back(before)
    assert module.value is value


def test_what_is_within_a_container_keeps_its_kind() -> None:
    there = {"q": deque([0], maxlen=2), "s": {1}, "r": [random.Random(1), 0], "t": (deque([5]), 6)}
    attributes = ChangedAttributes([("layer.", Keeping(there))], CPU)
    there["q"].extend([2, 3])  # type: ignore[attr-defined]
    there["s"].add(2)  # type: ignore[attr-defined]
    drawn = there["r"][0].random()  # type: ignore[index]
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(encode_tree(attributes.read(), tensors)))
    new = {"q": deque([0], maxlen=2), "s": {1}, "r": [random.Random(1), 0], "t": (deque([5]), 6)}
    ChangedAttributes([("layer.", Keeping(new))], CPU).restore(decode_tree(tree, tensors))
    assert repr(new["q"]) == "deque([2, 3], maxlen=2)"
    assert (new["s"], new["t"]) == ({1, 2}, (deque([5]), 6))
    assert new["r"][0].random() != drawn  # type: ignore[index]
