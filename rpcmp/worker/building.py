"""Build the layers of a stage as a process does that builds all of them, where that matters.

    Block.made += 1           in a constructor: the count goes on from layer to layer, in any stage
    lambda: Block(context)    for two layers: one object in one process; in two it is watched

Only layers that are written by hand have constructors; those of a cut are of one module.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

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
    modules, shared = _build(config, stage_index, names, loads)
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ConfigError(
                    f"'{name}.{key}' has no shape before the first forward: give "
                    f"{type(module).__name__} its sizes, in place of torch's Lazy modules"
                )
    return modules, shared


def _build(
    config: Config, stage_index: int, names: Collection[str], loads: bool
) -> tuple[dict[str, nn.Module], Objects]:
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
    others: dict[Any, list[tuple[range, str]]] = {}
    for layer, parameter in _trained_by_others(chain, ready, own):
        if (memory := _memory_of(parameter)) is not None:
            storage, bytes_ = memory
            others.setdefault(storage, []).append((bytes_, layer))
    kept = {id(each) for module in own.values() for each in module.parameters()}
    for path, tensor in _read_by(own):
        memory = None if id(tensor) in kept else _memory_of(tensor)
        storage, bytes_ = memory or (None, range(0))
        for theirs, layer in others.get(storage, ()):
            if max(bytes_.start, theirs.start) < min(bytes_.stop, theirs.stop):
                raise ConfigError(
                    f"a layer of this stage reads {path!r}, which the layer {layer!r} of another "
                    "stage trains: put both into one stage, or let each have its own weights and "
                    "list them in `tied`"
                )


def _trained_by_others(
    chain: Mapping[str, LayerFactory], ready: Mapping[str, nn.Module], own: Collection[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what layers of other stages train, as far as there is a module to be had of them."""
    for layer, factory in chain.items():
        if layer not in own:
            for each in [ready[layer]] if layer in ready else importing.held_by(factory):
                parameters = each.parameters() if isinstance(each, nn.Module) else ()
                yield from ((layer, p) for p in parameters if p.requires_grad)


def _memory_of(tensor: Tensor) -> tuple[Any, range] | None:
    """Return the memory of a tensor, and which bytes of it; None if it has no one piece."""
    if tensor.layout is not torch.strided or isinstance(
        tensor, UninitializedParameter | UninitializedBuffer
    ):
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    start = tensor.storage_offset() * tensor.itemsize
    return tensor.untyped_storage(), range(start, start + (last + 1) * tensor.itemsize)


def _read_by(own: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that layers reach and do not train, by name."""
    parts = parts_of([(f"{name}.", module) for name, module in own.items()])
    yield from hidden_parameters(parts, ()).items()
    for place in places_of(parts, ()):
        for tensor in pytree.tensors(place.owner.get(place.key)):
            yield place.name, tensor
    for prefix, part in parts:
        for key, value in [*vars(part).items()]:
            if isinstance(value, functools.partial):  # of a functional, with its weight
                for tensor in pytree.tensors([value.args, value.keywords]):
                    yield f"{prefix}{key}", tensor


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
        places = places_of(parts_of([(f"{name}.", module)]), ())
        for place in (each for each in places if not each.is_outer):
            value = place.owner.get(place.key)
            if isinstance(value, Tensor):
                if (memory := _memory_of(value)) is not None:
                    note(memory, place, name)  # on another device another tensor will lie there
            elif isinstance(value, ATOMS):
                note(place.id, place, name)
            else:
                note(id(value), value, name)
    pairs = Counter[tuple[str, ...]]()
    shared = []
    for each, holding in holders.values():
        if len(holding) > 1:
            first, second, *_ = holding
            pairs[first, second] += 1
            number = f" ({pairs[first, second]})" if pairs[first, second] > 1 else ""
            if 0 < len({*holding} & {*own}) < len(holding):
                shared.append((f"what {first!r} and {second!r} share{number}", each))
    return shared
