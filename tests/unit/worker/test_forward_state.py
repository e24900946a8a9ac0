"""What forwards change is put back, and goes on in another process."""

from __future__ import annotations

import copy
import json
import logging
import math
import random
from collections import Counter, deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rpcmp.rpc.tensors import decode_tree, encode_tree
from rpcmp.worker.forward_state import (
    ChangedAttributes,
    ForwardState,
    ParameterWatch,
    StateCopy,
)
from rpcmp.worker.outer_variables import StatePlace
from tests.zoo.surprises import CARRIED, Carrying

CPU = torch.device("cpu")


def called(module: nn.Module, times: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(times, 3, 4, generator=generator, dtype=torch.float64)
    return [module(each).detach() for each in draw]


@pytest.mark.parametrize("kind", CARRIED)
def test_what_was_put_back_goes_on_as_if_nothing_had_been_between(kind: str) -> None:
    module, other = Carrying(kind), Carrying(kind)
    state = ForwardState([("layer.", module)])
    before = state.copy()
    first = called(module, 2)
    state.put_back(before)
    assert all(map(torch.equal, first, called(module, 2)))
    state.learn(before)
    names = {each.place.name for each in state.copy()}
    assert len(names) == 1
    known = state.copy()
    called(module, 3)
    state.put_back(known)
    called(other, 2)
    assert all(map(torch.equal, called(module, 2), called(other, 2)))


@pytest.mark.parametrize("kind", CARRIED)
def test_a_new_module_goes_on_from_a_snapshot(kind: str) -> None:
    module, new = Carrying(kind), Carrying(kind)
    attributes = ChangedAttributes([("layer.", module)], CPU)
    assert attributes.read() == {}
    called(module, 2)
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(encode_tree(attributes.read(), tensors)))
    kept = {name: value.clone() for name, value in tensors.items()}
    new.load_state_dict(copy.deepcopy(module.state_dict()))
    expected = called(module, 2)
    ChangedAttributes([("layer.", new)], CPU).restore(decode_tree(tree, kept))
    assert all(map(torch.equal, called(new, 2), expected))


class Odd(nn.Module):
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
        (lambda: torch.zeros(3).to(torch.float8_e5m2), lambda value: value.fill_(1.0)),
    ],
)
def test_values_of_many_kinds_are_put_back_and_kept(make: Any, change: Any) -> None:
    module, new = Odd(make()), Odd(make())
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


def test_what_no_snapshot_can_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Odd(1j)
    attributes = ChangedAttributes([("layer.", module)], CPU)
    module.value = 2j
    for _ in range(2):
        assert attributes.read() == {}
    assert caplog.text.count("changes 'layer.value', where it keeps complex") == 1


def test_loggers_and_modules_are_no_state() -> None:
    module = Odd([])
    vars(module).update(logger=logging.getLogger("odd"), library=math)
    assert {each.place.name for each in ForwardState([("", module)]).copy()} == {"value"}


def test_a_parameter_that_was_changed_by_its_data_is_found() -> None:
    module = nn.Linear(3, 2)
    watch = ParameterWatch(dict(module.named_parameters()))
    assert watch.changed() == ""
    module.bias.data.mul_(2)
    assert watch.changed() == "bias"


def test_an_attribute_that_was_not_there_is_gone_again() -> None:
    """A module that remembers whether it was called is as it was before it was."""
    module = nn.Linear(2, 2)
    state = ForwardState([("", module)])
    before = state.copy()
    module.calls = 1  # type: ignore[assignment]
    state.put_back(before)
    assert not hasattr(module, "calls")
