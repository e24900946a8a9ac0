"""All layers of a model on this host, one after the other: only the largest has to fit.

Where stages are modules of their own, each of them is one layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rpcmp import devices, factory, layers, optimizers, tree
from rpcmp.balance.profile import HostProfile, LayerProfile, Order
from rpcmp.errors import JobError, RpcmpError
from rpcmp.graph import SOURCES, Reference
from rpcmp.profile.layer import Layer


def measure(order: Order, inputs: Any, targets: Any) -> HostProfile:
    """Each layer's times and bytes, fed with what the one before returns.

    Args:
        order: the job, as one stage.
        inputs, targets: of one micro-batch: trees of tensors (samples, ...).

    Raises:
        FactoryError: a layer cannot be built.
        JobError: one failed when it was run.
    """
    device = devices.resolve(order.config.stage(0).device)
    _load_lazily_loaded(order)
    base, available = devices.base_bytes(device), devices.available_bytes(device)
    one_by_one = _measure_graph if order.config.model is None else _measure_chain
    found = one_by_one(order, inputs, targets)
    return HostProfile(layers=found, base_bytes=base, available_bytes=available)


def _measure_chain(order: Order, inputs: Any, targets: Any) -> list[LayerProfile]:
    names = list(layers.chain_layers(order.config))
    found = []
    for name in names:
        wanted = targets if name == names[-1] else None
        profile, inputs = _measure_layer(order, name, [inputs], wanted)
        found.append(profile)
    return found


def _measure_graph(order: Order, inputs: Any, targets: Any) -> list[LayerProfile]:
    """Each stage, fed with what it reads; in the config's order."""
    config, graph = order.config, order.config.graph()
    has: dict[str, Any] = dict(zip(SOURCES, (inputs, targets), strict=True))
    found: dict[str, LayerProfile] = {}
    for name in graph.stages:
        given = [_part(name, reference, has) for reference in graph.inputs[name]]
        wanted, index = targets if name == graph.sink else None, config.stage_names.index(name)
        found[name], has[name] = _measure_layer(order, name, given, wanted, index)
    return [found[name] for name in config.stage_names]


def _part(stage: str, reference: Reference, has: dict[str, Any]) -> Any:
    try:
        return tree.select(has[reference.producer], reference.path)
    except LookupError as error:
        raise JobError(f"stage {stage!r} reads {str(reference)!r}: {error}") from error


def _load_lazily_loaded(order: Order) -> None:
    """Train a tiny model: torch loads some 100 MiB of itself only then, in a worker as well."""
    model = nn.Linear(2, 2, bias=False)  # some optimizers take matrices only
    optimizer = optimizers.create(order.config.optimizer_of(0), dict(model.named_parameters()))
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def _measure_layer(
    order: Order, name: str, inputs: list[Any], targets: Any, stage_index: int = 0
) -> tuple[LayerProfile, Any]:
    """What was measured, and what whoever reads the layer gets."""
    try:
        layer = Layer(order.config, name, inputs, targets, stage_index)
        found = layer.measure()
        return found, tree.map_tensors(
            lambda tensor: _received(tensor, order.differentiates), layer.outputs
        )
    except RpcmpError:
        raise
    except BaseException as error:  # sys.exit() in a layer as well
        text = f"measuring the layer {name!r} failed: {factory.explain(error)}"
        raise JobError(
            f"{text}\nit had received {', '.join(map(tree.describe, inputs))}"
        ) from error


def _received(tensor: Tensor, differentiates: bool) -> Tensor:
    """What the next layer gets: needs a gradient if this one's output did, or layers before it."""
    needs = tensor.requires_grad or (differentiates and tensor.is_floating_point())
    return tensor.requires_grad_(needs)
