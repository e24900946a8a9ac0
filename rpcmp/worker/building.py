"""Build the layers of a stage as a process does that builds all of them, where that matters.

    Block.made += 1           in a constructor: the count goes on from layer to layer, in any stage
    lambda: Block(context)    for two layers: one object in one process; in two it is watched

Only layers that are written by hand have constructors; those of a cut are of one module.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import layers
from rpcmp.pipelining.layers import LayerFactory
from rpcmp.worker.forward_state import copied, is_filled_in
from rpcmp.worker.state_places import CODE, Objects, hidden_parameters, parts_of, reached_places
from rpcmp.worker.state_values import ATOMS, content_of, plain_of


def build(
    config: Config, stage_index: int, names: Collection[str], loads: bool
) -> tuple[dict[str, nn.Module], Objects]:
    """Return a stage's modules, see `build_layers`, and the objects that they share with others.

    Raises:
        FactoryError: one cannot be built.
        ConfigError: one reads weights that another stage trains.
    """
    if config.model is None or config.cut is not None:
        return layers.build_layers(config, stage_index, names, loads), ()
    chain = layers.chain_layers(config)
    if len(chain) == len(names):
        return layers.build_layers(config, stage_index, names, loads, chain), ()
    _require_own_weights(chain, names)
    before = [copied(place) for place in reached_places([*chain.items()])]
    modules = layers.build_layers(config, stage_index, names, loads, chain)
    moved = [
        each
        for each in before
        if each.has_new_value
        and not is_filled_in(plain_of(each.content), plain_of(content_of(each.now)))
    ]
    if moved:
        for each in before:
            each.put_back()
        modules = layers.build_layers(config, stage_index, names, loads, chain, in_order=True)
    return modules, _shared(chain, names)


def _require_own_weights(chain: dict[str, LayerFactory], own: Collection[str]) -> None:
    """Refuse a layer that hides another stage's module: here its weights would stay as they are."""
    modules = {name: make() for name, make in layers.ready(chain).items()}
    trained = {
        parameter: name
        for name, module in modules.items()
        for parameter in module.parameters()
        if name not in own and parameter.requires_grad
    }
    parts = parts_of([(f"{name}.", each) for name, each in modules.items() if name in own])
    for path, parameter in hidden_parameters(parts, ()).items():
        if parameter in trained:
            raise ConfigError(
                f"a layer of this stage reads {path!r}, which the layer {trained[parameter]!r} of "
                "another stage trains: put both into one stage, or let each have its own weights "
                "and list them in `tied`"
            )


def _shared(chain: dict[str, LayerFactory], own: Collection[str]) -> Objects:
    """Return what factories of this stage and of another one hold, by the first two layers."""
    holders: dict[int, tuple[Any, list[str]]] = {}
    for name, factory in chain.items():
        for each in importing.held_by(factory):
            if not isinstance(each, (*CODE, *ATOMS, nn.Module)):
                _, holding = holders.setdefault(id(each), (each, []))
                if name not in holding:
                    holding.append(name)
    return [
        (f"what {holding[0]!r} and {holding[1]!r} share", each)
        for each, holding in holders.values()
        if len(holding) > 1 and 0 < len({*holding} & {*own}) < len(holding)
    ]
