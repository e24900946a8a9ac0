"""What forwards change is put back, and goes on in another process."""

from __future__ import annotations

import copy
import enum
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import CheckpointError
from rpcmp.rpc.tensors import decode_tree, encode_tree
from rpcmp.worker.state.forward_state import (
    ChangedAttributes,
    ForwardState,
    ParameterWatch,
    not_renormalized,
)
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


def test_what_no_snapshot_can_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Odd(1j)
    attributes = ChangedAttributes([("layer.", module)], CPU)
    module.value = 2j
    for _ in range(2):
        assert attributes.read() == {}
    assert caplog.text.count("changes 'layer.value', where it keeps complex") == 1


class Phase(enum.Enum):
    WARM, COLD = 1, 2


@dataclass(frozen=True)
class Step:
    number: int = 0


@pytest.mark.parametrize(("first", "second"), [(Phase.WARM, Phase.COLD), (Step(), Step(1))])
def test_another_object_in_an_attribute_is_put_back_and_named(
    first: Any, second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = Odd(first)
    attributes = ChangedAttributes([("layer.", module)], CPU)
    state = ForwardState([("layer.", module)])
    before = state.copy()
    module.value = second
    assert "layer.value" in [each.place.name for each in before if each.has_new_value]
    attributes.read()
    assert f"changes 'layer.value', where it keeps {type(first).__name__}" in caplog.text
    state.put_back(before)
    assert module.value is first


class Own(nn.LSTM):
    """A module of torch's that counts as well."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("aside", torch.zeros(2), persistent=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 100_000),
        ("_flat_weights", [torch.zeros(1)] * 4),
        ("_parameters", {}),
        ("forward", 1),
        ("training", False),
        ("weight_ih_l0", torch.zeros(1)),
        ("mean", torch.zeros(1)),
        ("aside", torch.zeros(2, dtype=torch.int64)),
        ("aside", 1),
    ],
)
def test_a_snapshot_sets_nothing_that_no_forward_keeps(name: str, value: Any) -> None:
    """Kernels trust the sizes and weights that a module of torch's has."""
    attributes = ChangedAttributes([("lstm.", Own())], CPU)
    with pytest.raises(CheckpointError, match=f"'lstm.{name}' in a snapshot is nothing"):
        attributes.restore({f"lstm.{name}": value})


def test_a_snapshot_sets_what_a_subclass_of_a_module_of_torchs_keeps() -> None:
    module = Own()
    attributes = ChangedAttributes([("lstm.", module)], CPU)
    attributes.restore({"lstm.calls": 3, "lstm.new": 4, "lstm.aside": torch.ones(2)})
    assert (module.calls, vars(module)["new"]) == (3, 4)
    assert torch.equal(module.get_buffer("aside"), torch.ones(2))


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


def test_embeddings_that_are_scaled_down_once_or_often_are_not_copied() -> None:
    module = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 1))
    copies = not_renormalized(module.named_parameters(), module.modules())
    assert [*copies] == ["1.weight", "1.bias"]
