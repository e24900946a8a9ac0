"""Building layers: they have the same bits on every host and for every cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import layers, random_streams
from rpcmp.rpc import tensors
from tests.zoo import models


def config(name: str = "layers", seed: int = 0, **kwargs: Any) -> Config:
    """Return a job with layers of tests.zoo.models."""
    model = {"layers": f"tests.zoo.models:{name}", "kwargs": kwargs}
    return parse_config({"loss": "torch.nn:MSELoss", "seed": seed, "model": model})


def sha256(*stages: dict[str, nn.Module]) -> str:
    """Return one hash of the parameters of all stages."""
    return tensors.parameters_sha256(
        {
            f"{layer}.{name}": value
            for stage in stages
            for layer, module in stage.items()
            for name, value in module.state_dict().items()
        }
    )


NAMES = ["first", "middle", "last"]


def test_layers_have_the_same_bits_wherever_the_model_is_cut() -> None:
    job = config()
    whole = sha256(layers.build_layers(job, 0, NAMES))
    for cut in (1, 2):
        # The second stage is built first, and numbers are drawn in between: neither must matter.
        second = layers.build_layers(job, 1, NAMES[cut:])
        torch.rand(7)
        assert sha256(layers.build_layers(job, 0, NAMES[:cut]), second) == whole
    assert sha256(*(layers.build_layers(job, 0, [name]) for name in NAMES)) == whole


def test_a_layer_is_initialized_from_the_seed_and_its_name() -> None:
    for name, make in models.layers():
        random_streams.seed_all(3, "init", name)
        expected = {name: make()}
        assert sha256(layers.build_layers(config(seed=3), 0, [name])) == sha256(expected)


def test_a_dict_of_factories_is_the_same_model() -> None:
    assert sha256(layers.build_layers(config("as_dict"), 0, NAMES)) == sha256(
        layers.build_layers(config(), 0, NAMES)
    )


@pytest.mark.parametrize("name", ["as_modules", "as_sequential"])
def test_layers_that_are_built_already_have_the_same_bits_for_every_cut(name: str) -> None:
    job = config(name)
    names = list(layers.chain_layers(job))
    whole = sha256(layers.build_layers(job, 0, names))
    assert sha256(*(layers.build_layers(job, 0, [layer]) for layer in names)) == whole
    assert sha256(layers.build_layers(config(name, seed=1), 0, names)) != whole


def test_a_sequential_gives_its_children_in_order() -> None:
    assert list(layers.chain_layers(config("as_sequential"))) == ["0", "1", "2", "3", "4"]


def test_sizes_count_parameters_and_allocate_nothing() -> None:
    huge = layers.chain_layers(config(width=10**6))
    assert layers.layer_sizes(huge) == [5 * 10**6, 10**12 + 10**6, 10**6 + 1]


def test_a_named_stage_is_one_layer_of_its_name() -> None:
    job = parse_config(
        {
            "loss": "torch.nn:MSELoss",
            "stages": [
                {"name": "a", "module": "torch.nn:Linear", "kwargs": _linear(4, 2)},
                {"name": "b", "module": "torch.nn:Linear", "kwargs": _linear(2, 1)},
            ],
        }
    )
    built = layers.build_layers(job, 1, ["b"])
    assert list(built) == ["b"]
    assert isinstance(built["b"], nn.Linear)
    assert built["b"].in_features == 2


def test_a_job_without_layers_has_no_chain() -> None:
    job = parse_config({"loss": "m:l", "stages": [{"module": "torch.nn:Linear"}]})
    with pytest.raises(ConfigError, match=r"only a job with \[model\]"):
        layers.chain_layers(job)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"must return \(name, factory\) pairs, a dict or an nn.Sequential"),
        ([models.layers], "must return"),
        ([("a", "b", "c")], "must return"),
        ([("a", 3)], "'a': 3 is not a named layer factory"),
        ([("", models.layers)], "is not a named layer factory"),
        ([(1, models.layers)], "is not a named layer factory"),
        ([("a", models.layers), ("a", models.layers)], "names two layers 'a'"),
        ([], "returns no layers"),
        ({}, "returns no layers"),
    ],
)
def test_a_value_that_is_not_a_list_of_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: Any, message: str
) -> None:
    monkeypatch.setattr(models, "returned", lambda: value)
    with pytest.raises(ConfigError, match=message):
        layers.chain_layers(config("returned"))


def test_a_function_that_raises_is_named() -> None:
    with pytest.raises(FactoryError, match=r"tests.zoo.models:raising' failed: ValueError"):
        layers.chain_layers(config("raising"))


@pytest.mark.parametrize(("name", "layer"), [("broken_layers", "bad"), ("lazy_layers", "lazy")])
def test_a_layer_that_cannot_be_sized_asks_for_a_balance(name: str, layer: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)layer '{layer}' cannot be sized.*give a `balance"):
        layers.layer_sizes(layers.chain_layers(config(name)))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("broken_layers", "bad", "layer 'bad' failed to build: ValueError: out of order"),
        ("no_modules", "number", "layer 'number' is int, not an nn.Module"),
    ],
)
def test_a_layer_that_cannot_be_built_is_named(name: str, layer: str, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        layers.build_layers(config(name), 0, [layer])


def _linear(in_features: int, out_features: int) -> dict[str, int]:
    return {"in_features": in_features, "out_features": out_features}


def test_layers_that_share_a_parameter_are_refused() -> None:
    for name in ("tied_modules", "tied_factories"):
        with pytest.raises(ConfigError, match="'first' and 'last' share the parameter 'weight'"):
            layers.build_layers(config(name), 0, ["first", "last"])
    with pytest.raises(ConfigError, match="share the parameter"):
        layers.chain_layers(config("tied_modules"))


def test_layer_names_that_collide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the layer names 'a' and 'a\.b' collide"):
        layers.chain_layers(config("colliding_layers"))
