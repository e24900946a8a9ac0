"""Nested tuples, lists and dicts of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from rpcmp.pipelining import pytree


class Pair(NamedTuple):
    left: Any
    right: Any


ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)
NESTED = {"b": [ONE, 7], "a": Pair(TWO, (THREE, None))}


def test_leaves_come_depth_first_and_dicts_in_insertion_order() -> None:
    assert list(pytree.leaves_with_path(NESTED)) == [
        (("b", 0), ONE),
        (("b", 1), 7),
        (("a", 0), TWO),
        (("a", 1, 0), THREE),
        (("a", 1, 1), None),
    ]
    assert [leaf for _, leaf in pytree.leaves_with_path(NESTED)] == list(pytree.leaves(NESTED))


def test_tensors_are_the_leaves_that_are_tensors() -> None:
    assert [len(tensor) for tensor in pytree.tensors(NESTED)] == [1, 2, 3]


@pytest.mark.parametrize("leaf", [3, "text", None, ONE])
def test_a_leaf_is_a_tree(leaf: object) -> None:
    assert list(pytree.leaves(leaf)) == [leaf]
    assert pytree.map_leaves(lambda found: [found], leaf) == [leaf]


def test_mapping_keeps_every_container_and_its_type() -> None:
    mapped = pytree.map_leaves(lambda leaf: "tensor" if torch.is_tensor(leaf) else leaf, NESTED)
    assert mapped == {"b": ["tensor", 7], "a": Pair("tensor", ("tensor", None))}
    assert list(mapped) == ["b", "a"]
    assert type(mapped["a"]) is Pair
    assert type(mapped["a"].right) is tuple


def test_mapping_follows_the_order_of_the_leaves() -> None:
    seen: list[object] = []
    pytree.map_leaves(seen.append, NESTED)
    assert seen == list(pytree.leaves(NESTED))


def test_mapping_tensors_leaves_everything_else_as_it_is() -> None:
    assert pytree.map_tensors(len, NESTED) == {"b": [1, 7], "a": Pair(2, (3, None))}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ((), NESTED),
        (("b", "1"), 7),
        (("a", "1", "0"), THREE),
    ],
)
def test_a_path_selects_a_part(path: tuple[str, ...], part: object) -> None:
    assert pytree.select(NESTED, path) is part


@pytest.mark.parametrize("path", [("c",), ("b", "2"), ("b", "x"), ("b", "-1"), ("b", "0", "0")])
def test_a_path_that_does_not_exist_is_refused_with_the_existing_names(
    path: tuple[str, ...],
) -> None:
    with pytest.raises(LookupError, match=rf"no part '{path[-1]}' in [{{(f]"):
        pytree.select(NESTED, path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"image": torch.zeros(8, 1, 8, 8)}, "{'image': float32[8, 1, 8, 8]}"),
        ((torch.tensor(1), [3, None]), "(int64[], (int, NoneType))"),
        (torch.zeros(2, dtype=torch.bfloat16), "bfloat16[2]"),
    ],
)
def test_a_description_names_types_and_shapes(value: object, text: str) -> None:
    assert pytree.describe(value) == text
