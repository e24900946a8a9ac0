"""Build the model's layers: each host its own, with the same bits on every host.

A layer is the unit of a balance, of the names of parameters and of random streams. A chain's layers
come from the config's `layers` callable, or are cut out of its `module`; a named stage is one layer
of its own name. Each layer is
initialized from its own stream of random numbers, so a model's parameters do not depend on where it
is cut; see `random_streams`.

A run may start from given weights: see `initial_weights`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import random_streams
from rpcmp.pipelining.initial_weights import StoredNames, load_weights
from rpcmp.pipelining.weight_files import WeightFiles
from rpcmp.splitting.building import init_at, require_plain

LayerFactory = Callable[[], nn.Module]


def chain_layers(config: Config) -> dict[str, LayerFactory]:
    """Return the factories of the layers of a `[model]`, by name, in order."""
    if config.model is None:
        raise ConfigError("only a job with [model] has a list of layers")
    if config.model.module is not None:
        from rpcmp.pipelining import split_layers  # torch.export takes a while to import

        return split_layers.layer_factories(config)
    random_streams.seed_all(config.seed, "layers")
    model = config.model
    with init_at(config.init):
        source = Factory(callable=model.source, kwargs=model.kwargs)
        value = importing.create(source, "model.layers")
    layers: dict[str, LayerFactory] = {}
    for name, layer in _pairs(value, model.source):
        if name in layers:
            raise ConfigError(f"{model.source} names two layers {name!r}")
        layers[name] = layer
    _check_names(list(layers), model.source)
    _refuse_shared_parameters({name: layer() for name, layer in ready(layers).items()})
    return layers


def ready(layers: Mapping[str, LayerFactory]) -> dict[str, LayerFactory]:
    """Return the layers that are modules already, or functions that may return the same one."""
    holders = defaultdict[int, set[str]](set)
    for name, layer in layers.items():
        for each in importing.held_by(layer):
            if isinstance(each, nn.Module):
                holders[id(each)].add(name)
    shared = set[str]().union(*(names for names in holders.values() if len(names) > 1))
    return {n: each for n, each in layers.items() if isinstance(each, _Ready) or n in shared}


def layer_sizes(layers: Mapping[str, LayerFactory]) -> list[int]:
    """Return the parameters per layer, counted on the meta device without allocating any."""
    sizes = []
    for name, layer in layers.items():
        try:
            with torch.device("meta"):
                module = layer()
            sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        except Exception as error:
            raise ConfigError(
                f"layer {name!r} cannot be sized ({importing.explain_error(error)}); "
                "give a `balance`"
            ) from error
    return sizes


def build_layers(
    config: Config,
    stage_index: int,
    names: Collection[str],
    loads: bool = True,
    chain: Mapping[str, LayerFactory] | None = None,
    in_order: bool = False,
) -> dict[str, nn.Module]:
    """Build and initialize the modules of one stage, by layer name, on the CPU.

    Args:
        names: the stage's layers; for a named stage, its own name.
        loads: whether to load the weights of `init`, if there is one.
        chain: what `chain_layers` has returned; None: it is called.
        in_order: whether to call the constructors of other stages' layers as well, on the meta
            device, as one process that builds the whole model does.
    """
    stage = config.stage(stage_index)
    if config.model is not None:
        layers = chain_layers(config) if chain is None else chain
        factories = {name: layers[name] for name in (layers if in_order else names)}
    else:
        (name,) = names
        source = Factory(callable=stage.module or "", kwargs=stage.kwargs)
        create = functools.partial(importing.create, source, f"stage {name!r}: module")
        factories = {name: create}
    with init_at(config.init):
        modules = {}
        for name, make in factories.items():
            if name in names:
                modules[name] = _build_layer(config.seed, name, make)
            else:
                _build_sized(name, make)
    _refuse_shared_parameters(modules)
    if loads and config.init is not None:
        prefixed = {name: (config.prefix_of(name), module) for name, module in modules.items()}
        owns_prefixes = config.cut is None and all(stage.prefix is None for stage in config.stages)
        weights = WeightFiles(config.init)
        stored = StoredNames.of(config, weights)
        load_weights(weights, prefixed, stored, owns_prefixes)
    return modules


def _build_sized(name: str, layer: LayerFactory) -> nn.Module:
    """Build a layer without memory for its parameters."""
    try:
        with torch.device("meta"):
            return layer()
    except Exception as error:
        raise FactoryError(
            f"layer {name!r} of another stage cannot be built without its memory, which has to be "
            "since constructors count in variables that others read: give layers what they need by "
            f"arguments ({importing.explain_error(error)})"
        ) from error


def _build_layer(seed: int, name: str, layer: LayerFactory) -> nn.Module:
    random_streams.seed_all(seed, "init", name)
    try:
        module = layer()
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(
            f"layer {name!r} failed to build: {importing.explain_error(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise FactoryError(f"layer {name!r} is {type(module).__name__}, not an nn.Module")
    require_plain(module, f"layer {name!r}", cuts=False)
    return module


def _pairs(value: Any, source: str) -> Iterable[tuple[str, LayerFactory]]:
    if isinstance(value, nn.Module):  # a module that stands twice in a Sequential is two layers
        named = value.named_modules(remove_duplicate=False)
        value = [(name, module) for name, module in named if name and "." not in name]
    items = value.items() if isinstance(value, Mapping) else value
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
    """Check names: parameters are "<layer>.<parameter>", so no name may be a prefix of another."""
    if not names:
        raise ConfigError(f"{source} returns no layers")
    for name in names:
        for other in names:
            if other.startswith(f"{name}."):
                raise ConfigError(f"{source}: the layer names {name!r} and {other!r} collide")


def _refuse_shared_parameters(modules: Mapping[str, nn.Module]) -> None:
    """Refuse shared parameters: a cut would give each layer a copy, and change the model."""
    owners: dict[nn.Parameter, str] = {}
    for layer, module in modules.items():
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(parameter, layer)
            if owner != layer:
                raise ConfigError(
                    f"the layers {owner!r} and {layer!r} share the parameter {name!r}; put both "
                    "into one layer, or let each build its own and list them in `tied`"
                )
