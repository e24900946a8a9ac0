"""Layers that were cut out of a module: their values are those of its own constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.driver.module_cut import as_cut
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import layers, split_layers
from rpcmp.pipelining.microbatches import smallest_for
from tests.support.splitmodules import split_of
from tests.zoo import unsplit

CLASSES = {"language": "Language", "skips": "Skipping"}


def job(name: str = "language", **keys: Any) -> Config:
    data = {"loss": "m:loss", "seed": 7, "model": {"module": f"tests.zoo.unsplit:{CLASSES[name]}"}}
    return parse_config({**data, **keys}).with_cut(as_cut(split_of(name)[1], split_of(name)[0]))


def test_every_host_has_the_values_of_the_constructor_under_the_seed() -> None:
    torch.manual_seed(7)
    whole = unsplit.Language().state_dict()
    names = list(layers.chain_layers(job()))
    assert names == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    for part in (names[:2], names[2:]):
        built = layers.build_layers(job(), 0, part)
        assert list(built) == part
        for module in built.values():
            for name, value in module.state_dict().items():
                assert torch.equal(value, whole[name]), name


def test_sizes_are_counted_without_memory() -> None:
    factories = layers.chain_layers(job())
    with torch.device("meta"):
        head = factories["head"]()
    assert {value.device.type for value in head.state_dict().values()} == {"meta"}
    assert sum(layers.layer_sizes(factories)) == sum(
        parameter.numel() for parameter in unsplit.Language().parameters()
    ) + (11 * 8)  # the head has its own


def test_layers_that_are_measured_get_some_values() -> None:
    with split_layers.any_values():
        first = layers.build_layers(job(), 0, ["layers.1"])["layers.1"]
    again = layers.build_layers(job(), 0, ["layers.1"])["layers.1"]
    for name, value in first.named_parameters():
        assert bool(value.abs().max() > 0)
        assert not torch.equal(value, dict(again.named_parameters())[name])


def test_batch_normalization_needs_two_samples() -> None:
    built = layers.build_layers(job("skips"), 0, ["down.0", "out"])
    assert smallest_for([built["down.0"]]) == 2
    assert smallest_for([built["out"]]) == 1
    assert smallest_for([built["down.0"].eval()]) == 1


class Stubborn(nn.Module):
    """A constructor that looks at the values of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = float(self.inner.weight.detach().abs().max())


def no_module() -> int:
    return 3


def test_a_constructor_that_needs_values_gets_them() -> None:
    config = job(model={"module": f"{__name__}:Stubborn"})
    skeleton = split_layers.build_skeleton(config)
    assert isinstance(skeleton, Stubborn)
    assert skeleton.scale > 0


def test_a_callable_that_makes_no_module_is_refused() -> None:
    config = job(model={"module": f"{__name__}:no_module"})
    with pytest.raises(FactoryError, match=r"returns int, not an nn\.Module"):
        split_layers.build_module(config)
    uncut = config.model_copy(update={"cut": None})
    with pytest.raises(ConfigError, match="`module` has not been cut"):
        layers.chain_layers(uncut)
