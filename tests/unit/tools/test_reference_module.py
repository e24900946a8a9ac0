"""The unmodified module as the reference of what it was cut into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.driver.module_cut import as_cut
from rpcmp.errors import JobError
from rpcmp.pipelining import layers, pytree
from rpcmp.splitting.split import split_module
from rpcmp.tools.reference_module import EagerModule
from tests.support.splitmodules import CASES, split_of
from tests.zoo import unsplit


def cut_job(make: Any, split: Any) -> Config:
    data = {"loss": "m:loss", "model": {"module": f"tests.zoo.unsplit:{make.__name__}"}}
    return parse_config(data).with_cut(as_cut(split, make()))


def eager(config: Config) -> tuple[EagerModule, dict[str, nn.Module], list[str]]:
    """Return the module, its layers, and a list that will have the layers as they are entered."""
    cut = config.cut
    assert cut is not None
    built = layers.build_layers(config, 0, cut.layers)
    entered: list[str] = []

    def seed(layer: str) -> None:
        entered.append(layer)
        torch.manual_seed(hash(layer) % 1000)

    def between(value: Any) -> Any:
        return pytree.map_tensors(lambda tensor: tensor.clone(), value)

    return EagerModule(config, built, seed, between), built, entered


UNCUT = ["language", "two by two", "skips", "repeating", "returning", "half frozen", "counting"]


@pytest.mark.parametrize("name", UNCUT)
def test_it_enters_each_layer_where_it_was_cut(name: str) -> None:
    make, batch = CASES[name]
    config = cut_job(make, split_of(name)[1])
    module, built, entered = eager(config)
    inputs = batch(4, 8)
    for _ in range(2):
        entered.clear()
        expected = module(inputs)
        assert entered == list(built)
        value = inputs
        for layer, part in built.items():
            torch.manual_seed(hash(layer) % 1000)
            value = part(pytree.map_tensors(lambda tensor: tensor.clone(), value))
        both = zip(pytree.tensors(expected), pytree.tensors(value), strict=True)
        assert all(torch.equal(a, b) for a, b in both)


def test_gradients_go_to_the_copy_of_the_layer_that_uses_it() -> None:
    config = cut_job(unsplit.HalfFrozen, split_of("half frozen")[1])
    module, built, _ = eager(config)
    module(CASES["half frozen"][1](4, 8)).square().mean().backward()
    first = dict(built["embed"].named_parameters())["embed.weight"]
    last = dict(built["embed+"].named_parameters())["embed.weight@5"]
    assert first.grad is None  # what comes after it has no gradients
    assert last.grad is not None


class Shuffled(unsplit.TwoByTwo):
    """Runs its blocks in another order once it has been cut."""

    order = (0, 1, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.left(left) + self.right(right)
        for index in self.order:
            hidden = self.blocks[index](hidden)
        return self.first(hidden), self.second(hidden)


@pytest.mark.parametrize(
    ("order", "text"),
    [((0, 2, 1), "runs 'blocks.2' in another order"), ((0, 1), "has not run 'blocks.2'")],
)
def test_a_module_that_runs_otherwise_than_when_it_was_cut_is_an_error(
    order: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsplit, "Shuffled", Shuffled, raising=False)
    batch = CASES["two by two"][1](4, 8)
    module, _, _ = eager(cut_job(Shuffled, split_module(Shuffled(), batch)))
    module(batch)
    monkeypatch.setattr(Shuffled, "order", order)
    with pytest.raises(JobError, match=text):
        module(batch)
