"""Building the model's layers: each host only its own, and the same bits on every host.

A layer is the unit that a balance counts, that parameters are named after and that randomness is
derived for. A chain's layers come from the config's `layers` callable; a named stage is one layer
of its own name. Layers are initialized from (seed, layer name), so the parameters of a model do
not depend on where it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpcmp import factory, seeds, weights
from rpcmp.config import Config
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.kinds import Factory

LayerFactory = Callable[[], nn.Module]


def chain_layers(config: Config) -> dict[str, LayerFactory]:
    """The layers of a `[model]`, by name, in order, not built yet.

    Raises:
        ConfigError: `layers` fails or does not return named layers.
    """
    if config.model is None:
        raise ConfigError("only a job with [model] has a list of layers")
    seeds.seed_all(config.seed, "layers")
    model = config.model
    made = factory.create(Factory(callable=model.layers, kwargs=model.kwargs), "model.layers")
    layers: dict[str, LayerFactory] = {}
    for name, layer in _pairs(made, model.layers):
        if name in layers:
            raise ConfigError(f"{model.layers} names two layers {name!r}")
        layers[name] = layer
    _check_names(list(layers), model.layers)
    ready = {name: layer() for name, layer in layers.items() if isinstance(layer, _Ready)}
    _refuse_shared_parameters(ready)
    return layers


def layer_sizes(layers: Mapping[str, LayerFactory]) -> list[int]:
    """Parameters of each layer, counted on the meta device: nothing is allocated.

    Raises:
        ConfigError: a layer cannot be built on the meta device.
    """
    sizes = []
    for name, layer in layers.items():
        try:
            with torch.device("meta"):
                module = layer()
            sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        except Exception as error:
            raise ConfigError(
                f"layer {name!r} cannot be sized ({factory.explain(error)}); give a `balance`"
            ) from error
    return sizes


def build(config: Config, stage_index: int, names: Iterable[str]) -> dict[str, nn.Module]:
    """The initialized modules of one stage, by layer name, on the CPU.

    Args:
        names: the stage's layers; for a named stage, its own name.

    Raises:
        FactoryError: a factory does not import, raised, or returned no module.
        ConfigError: the weights to start from do not fit.
    """
    stage = config.stage(stage_index)
    if config.model is not None:
        layers = chain_layers(config)
        built = {name: _build_layer(config.seed, name, layers[name]) for name in names}
        _refuse_shared_parameters(built)
        return _with_weights(config, built)
    (name,) = names
    source = Factory(callable=stage.module or "", kwargs=stage.kwargs)

    def make() -> nn.Module:
        module: nn.Module = factory.create(source, f"stage {name!r}: module")
        return module

    return _with_weights(config, {name: _build_layer(config.seed, name, make)})


def _with_weights(config: Config, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    if config.init is not None:
        prefixed = {name: (config.prefix_of(name), module) for name, module in modules.items()}
        owns = all(stage.prefix is None for stage in config.stages)
        weights.load(config.init, prefixed, config.tied_to, owns)
    return modules


def _build_layer(seed: int, name: str, layer: LayerFactory) -> nn.Module:
    seeds.seed_all(seed, "init", name)
    try:
        module = layer()
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(f"layer {name!r} failed to build: {factory.explain(error)}") from error
    if not isinstance(module, nn.Module):
        raise FactoryError(f"layer {name!r} is {type(module).__name__}, not an nn.Module")
    return module


def _pairs(made: Any, source: str) -> Iterable[tuple[str, LayerFactory]]:
    """(name, factory) pairs from all that `layers` may return."""
    if isinstance(made, nn.Module):  # a module that stands twice in a Sequential is two layers
        every = made.named_modules(remove_duplicate=False)
        made = [(name, module) for name, module in every if name and "." not in name]
    items = made.items() if isinstance(made, Mapping) else made
    try:
        pairs = [(name, layer) for name, layer in items]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{source} must return (name, factory) pairs, a dict or an nn.Sequential"
        ) from error
    for name, layer in pairs:
        if not isinstance(name, str) or not name or not callable(layer):
            raise ConfigError(f"{source}: {name!r}: {layer!r} is not a named layer factory")
        yield name, _Ready(layer) if isinstance(layer, nn.Module) else layer


@dataclass(frozen=True)
class _Ready:
    """The factory of a layer that was given as a module, already built."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return self.module


def _check_names(names: list[str], source: str) -> None:
    """Parameters are named "<layer>.<parameter>", so no layer's name may begin another's."""
    if not names:
        raise ConfigError(f"{source} returns no layers")
    for name in names:
        for other in names:
            if other.startswith(f"{name}."):
                raise ConfigError(f"{source}: the layer names {name!r} and {other!r} collide")


def _refuse_shared_parameters(modules: Mapping[str, nn.Module]) -> None:
    """A cut between two layers would give each a copy of its own: the model would change."""
    owners: dict[nn.Parameter, str] = {}
    for layer, module in modules.items():
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(parameter, layer)
            if owner != layer:
                raise ConfigError(
                    f"the layers {owner!r} and {layer!r} share the parameter {name!r}; put both "
                    "into one layer, or let each build its own and list them in `tied`"
                )
