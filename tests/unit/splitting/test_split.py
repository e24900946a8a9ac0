"""Modules that were cut: each computes what it did, to the last bit, wherever it is cut."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree
from rpcmp.splitting.split import Constant, Split, split_module
from tests.support.splitmodules import CASES, layers_of, rows, split_of
from tests.zoo import unsplit


def on_another_host(value: Any) -> Any:
    """Return a layer's output as another host gets it."""
    return pytree.map_tensors(lambda tensor: tensor.clone(), value)


HOSTS: list[Callable[[Any], Any]] = [lambda value: value, on_another_host]


def gradients(modules: list[Any], split: Split) -> dict[str, Tensor | None]:
    found = {name: p.grad for each in modules for name, p in each.named_parameters()}
    for first, *others in split.tied:
        parts = [found.pop(name) for name in (*others, first)]
        found[first] = functools.reduce(_add, parts)
    return found


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def backward(outputs: Any) -> None:
    loss: Any = sum(each.square().mean() for each in pytree.tensors(outputs))
    loss.backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_layers_compute_what_the_module_does(name: str, training: bool) -> None:
    """Outputs, gradients and buffers, at other sizes than those that it was exported at."""
    module, split = split_of(name)
    for samples, length in ((4, 8), (3, 8), (1, 8), (5, 12)):
        batch = CASES[name][1](samples, length)
        whole = copy.deepcopy(module).train(training)
        torch.manual_seed(1)
        if isinstance(batch, dict):
            expected = whole(**batch)
        else:
            expected = whole(*(batch if isinstance(batch, tuple) else [batch]))
        backward(expected)
        for passes in HOSTS:
            layers = layers_of(module, split)
            torch.manual_seed(1)
            value = batch
            for layer in layers:
                value = layer.train(training)(passes(value))
            found = [each for each in pytree.leaves(value) if each is not None]
            wanted = [each for each in pytree.leaves(expected) if each is not None]
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            backward(value)
            grads = gradients(layers, split)
            for key, parameter in whole.named_parameters():
                same = grads[key], parameter.grad
                assert same == (None, None) or torch.equal(*same), key  # type: ignore[arg-type]
            buffers = {key: each for layer in layers for key, each in layer.named_buffers()}
            for key, buffer in whole.named_buffers():
                assert key not in buffers or torch.equal(buffers[key], buffer), key


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1.5, -2.0]), torch.tensor(3), torch.zeros(0, 2), torch.tensor([[True, False]])],
)
def test_a_constant_survives_json(tensor: Tensor) -> None:
    found = Constant.model_validate_json(Constant.of(tensor).model_dump_json()).tensor()
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", [3]), ("float32", [2**40]), ("load", [2]), ("nothing", [2])]
)
def test_a_constant_has_the_bytes_of_its_shape(dtype: str, shape: list[int]) -> None:
    data = Constant.of(torch.ones(2)).data
    with pytest.raises(ConfigError, match=rf"a constant of {dtype}.* has 8 bytes"):
        Constant(dtype=dtype, shape=shape, data=data).tensor()


@pytest.mark.parametrize("text", ["", "AAAA", "eJw="])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no split|validation error|padding"):
        Split.unpack(text)


def test_a_module_that_fixes_the_number_of_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="fixes the number of samples of '0'"):
        split_module(unsplit.Fixed(), rows(4, 8))


def test_a_line_of_the_module_is_kept_with_each_operation() -> None:
    _, split = split_of("two by two")
    nodes = [node for layer in split.layers for node in layer.training.nodes]
    assert {node.where.partition(":")[0] for node in nodes} == {"unsplit.py"}


def test_a_module_is_left_in_its_modes_also_after_an_error() -> None:
    for module in (unsplit.TwoByTwo().eval(), unsplit.Branching().eval()):
        first = next(module.children()).train()
        with contextlib.suppress(ConfigError):
            split_module(module, CASES["two by two"][1](4, 8))
        assert (module.training, first.training) == (False, True)
