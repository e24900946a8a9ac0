"""Build the layers of a stage as a process does that builds all of them, where that matters.

    Block.made += 1           in a constructor: the count goes on from layer to layer, in any stage
    lambda: Block(context)    for two layers: one object in one process; in two it is watched

Only layers that are written by hand have constructors; those of a cut are of one module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import layers, pytree
from rpcmp.pipelining.layers import LayerFactory
from rpcmp.worker.state.forward_state import copied, is_filled_in
from rpcmp.worker.state.places import (
    CODE,
    Objects,
    hidden_parameters,
    parts_of,
    places_of,
    reached_places,
)
from rpcmp.worker.state.values import ATOMS, content_of, plain_of


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
    ready = {name: make() for name, make in layers.ready(chain).items()}
    _require_own_weights(chain, ready, modules)
    return modules, _shared(chain, ready, names)


def _require_own_weights(
    chain: Mapping[str, LayerFactory],
    ready: Mapping[str, nn.Module],
    own: Mapping[str, nn.Module],
) -> None:
    """Refuse a layer that reads what another stage trains: here it would stay as it is.

    That is seen by memory, also behind a `detach`.
    """
    others: dict[Any, str] = {}
    for name, factory in chain.items():
        held = [ready[name]] if name in ready else importing.held_by(factory)
        for module in held if name not in own else ():
            if isinstance(module, nn.Module):
                trained = (each for each in module.parameters() if each.requires_grad)
                others.update(dict.fromkeys(map(Tensor.untyped_storage, trained), name))
    kept = {each.untyped_storage() for module in own.values() for each in module.parameters()}
    for path, tensor in _read_by(own):
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage in others and storage not in kept:
            raise ConfigError(
                f"a layer of this stage reads {path!r}, which the layer {others[storage]!r} of "
                "another stage trains: put both into one stage, or let each have its own weights "
                "and list them in `tied`"
            )


def _read_by(own: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that layers reach and do not train, by name."""
    parts = parts_of([(f"{name}.", module) for name, module in own.items()])
    yield from hidden_parameters(parts, ()).items()
    for place in places_of(parts, ()):
        for tensor in pytree.tensors(place.owner.get(place.key)):
            yield place.name, tensor


def _shared(
    chain: Mapping[str, LayerFactory], ready: Mapping[str, nn.Module], own: Collection[str]
) -> Objects:
    """Return what layers of this stage and of another one have, by the first two that do."""
    holders: dict[Any, tuple[Any, list[str]]] = {}

    def note(key: Any, value: Any, name: str) -> None:
        _, holding = holders.setdefault(key, (value, []))
        if name not in holding:
            holding.append(name)

    for name, factory in chain.items():
        for each in importing.held_by(factory):
            if not isinstance(each, (*CODE, *ATOMS, nn.Module)):
                note(id(each), each, name)
    for name, module in ready.items():
        parts = parts_of([(f"{name}.", module)])
        buffers = {id(part._buffers): part._buffers for _, part in parts}
        for place in places_of(parts, ()):
            value = place.owner[place.key]
            if isinstance(value, Tensor) and value.layout is torch.strided:
                # On another device a buffer is another tensor, in the same dict.
                note(value.untyped_storage(), buffers.get(id(place.owner), value), name)
    pairs = Counter[tuple[str, ...]]()
    shared = []
    for each, holding in holders.values():
        if len(holding) > 1 and 0 < len({*holding} & {*own}) < len(holding):
            first, second, *_ = holding
            pairs[first, second] += 1
            number = f" ({pairs[first, second]})" if pairs[first, second] > 1 else ""
            shared.append((f"what {first!r} and {second!r} share{number}", each))
    return shared
