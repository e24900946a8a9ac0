"""Trees as JSON and named tensors: every shape comes back, every tensor has a name of its own."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rpcmp.rpc.tensors import decode_tree, encode_tree
from tests.support.examples import examples


def t(number: int) -> Tensor:
    return torch.tensor(number)


def encoded(value: Any, name: str = "") -> dict[str, Tensor]:
    """Encode `value` and check that it decodes unchanged; returns the named tensors."""
    tensors: dict[str, Tensor] = {}
    spec = json.loads(json.dumps(encode_tree(value, tensors, name)))
    assert repr(decode_tree(spec, tensors)) == repr(value)
    return tensors


def numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(tensor) for name, tensor in tensors.items()}


# Names


@pytest.mark.parametrize(
    ("value", "name", "names"),
    [
        (t(1), "", {"tensor": 1}),
        (t(1), "a", {"a": 1}),
        ({"a": t(1), "b": t(2)}, "", {"a": 1, "b": 2}),
        ({"a": {"b": t(1)}, "c": [t(2), (t(3),)]}, "", {"a.b": 1, "c.0": 2, "c.1.0": 3}),
        ([t(1), {"x": t(2)}], "optimizer", {"optimizer.0": 1, "optimizer.1.x": 2}),
        ({1: t(1), None: t(2), 1.5: t(3)}, "", {"1": 1, "None": 2, "1.5": 3}),
        ({"": t(1)}, "", {"tensor": 1}),
        ({"": {"a": t(1)}}, "n", {"n..a": 1}),
        ([None, 3, "text", t(1)], "", {"3": 1}),
    ],
)
def test_tensors_are_named_after_the_keys_that_lead_to_them(
    value: Any, name: str, names: dict[str, int]
) -> None:
    assert numbers(encoded(value, name)) == names


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({1: t(1), "1": t(2)}, {"1": 1, "1'": 2}),
        ({1: t(1), "1": t(2), 1.0001: t(3), "1'": t(4)}, {"1": 1, "1'": 2, "1.0001": 3, "1''": 4}),
        ({"a.b": t(1), "a": {"b": t(2)}}, {"a.b": 1, "a.b'": 2}),
        ({"a": {"b": t(1), "b.c": t(2)}, "a.b": {"c": t(3)}}, {"a.b": 1, "a.b.c": 2, "a.b.c'": 3}),
        ({None: t(1), "None": t(2), True: t(3), "True": t(4)}, None),
        ([t(1), {"": t(2)}, {"1.": t(3)}], None),
        ({"tensor": t(1), "": t(2)}, {"tensor": 1, "tensor'": 2}),
        ({"x'": t(1), "x": t(2), "y": {}, "y'": t(3)}, {"x'": 1, "x": 2, "y'": 3}),
    ],
)
def test_colliding_names_get_different_tensors(value: Any, names: dict[str, int] | None) -> None:
    found = numbers(encoded(value))
    assert sorted(found.values()) == list(range(1, len(found) + 1))
    assert names is None or found == names


def test_several_trees_share_one_set_of_names() -> None:
    tensors = {"a": t(1)}
    specs = [
        encode_tree({"a": t(2)}, tensors),
        encode_tree(t(3), tensors, "a"),
        encode_tree([], tensors),
    ]
    assert numbers(tensors) == {"a": 1, "a'": 2, "a''": 3}
    assert [decode_tree(spec, tensors) for spec in specs] == [{"a": t(2)}, t(3), []]


def test_a_tensor_that_occurs_twice_is_decoded_twice() -> None:
    shared = t(1)
    assert numbers(encoded([shared, shared])) == {"0": 1, "1": 1}


# Trees


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Pair(1, 2), (1, 2)),
        (torch.Size([2, 3]), (2, 3)),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
    ],
)
def test_subclasses_of_tuple_and_dict_become_plain(value: Any, found: Any) -> None:
    decoded = decode_tree(encode_tree(value, {}), {})
    assert decoded == found
    assert type(decoded) is type(found)


@pytest.mark.parametrize(
    "leaf", [object(), b"bytes", {1, 2}, 1j, test_colliding_names_get_different_tensors, range(2)]
)
@pytest.mark.parametrize("at", ["root", "list", "dict"])
def test_a_leaf_that_is_not_plain_is_refused(leaf: object, at: str) -> None:
    value = {"root": leaf, "list": [1, (leaf,)], "dict": {"a": {"b": leaf}}}[at]
    with pytest.raises(TypeError, match=f"^{type(leaf).__name__} is neither a tensor nor a plain"):
        encode_tree(value, {})


@pytest.mark.parametrize("key", [(1, 2), b"key", frozenset()])
def test_a_key_that_is_not_plain_is_refused(key: object) -> None:
    with pytest.raises(TypeError, match=f"^{type(key).__name__} is neither"):
        encode_tree({"a": [{key: 1}]}, {})


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.none() | st.integers(-2, 2) | st.sampled_from([0.5, "", "0", "1", "a", "a.b", "b", "'"])
LEAVES = PLAIN | st.integers(0, 99).map(t)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=15,
)


@examples(300)
@given(TREES, st.sampled_from(["", "a", "a.b"]))
def test_any_tree_is_decoded_unchanged(value: Any, name: str) -> None:
    assert len(encoded(value, name)) == repr(value).count("tensor(")


@settings(deadline=None, derandomize=True)
@given(st.lists(TREES, max_size=4))
def test_trees_with_any_keys_keep_their_own_tensors(trees: list[Any]) -> None:
    tensors: dict[str, Tensor] = {}
    specs = [encode_tree(value, tensors, "a") for value in trees]
    assert [repr(decode_tree(spec, tensors)) for spec in specs] == [repr(value) for value in trees]
