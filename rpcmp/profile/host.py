"""All layers of a model on this host, one after the other: only the largest has to fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rpcmp import devices, factory, layers, tree
from rpcmp.balance.profile import HostProfile, LayerProfile, Order
from rpcmp.errors import JobError, RpcmpError
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
    names = list(layers.chain_layers(order.config))
    found = []
    for name in names:
        profile, outputs = _measure_layer(order, name, inputs, targets, name == names[-1])
        inputs = tree.map_tensors(lambda tensor: _received(tensor, order.differentiates), outputs)
        found.append(profile)
    return HostProfile(layers=found, base_bytes=base, available_bytes=available)


def _load_lazily_loaded(order: Order) -> None:
    """Train a tiny model: torch loads some 100 MiB of itself only then, in a worker as well."""
    model = nn.Linear(2, 2)
    optimizer = factory.create(order.config.optimizer_of(0), "optimizer", list(model.parameters()))
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def _measure_layer(
    order: Order, name: str, inputs: Any, targets: Any, is_last: bool
) -> tuple[LayerProfile, Any]:
    try:
        layer = Layer(order.config, name, inputs, targets if is_last else None)
        return layer.measure(), layer.outputs
    except RpcmpError:
        raise
    except BaseException as error:  # sys.exit() in a layer as well
        text = f"measuring the layer {name!r} failed: {factory.explain(error)}"
        raise JobError(f"{text}\nit had received {tree.describe(inputs)}") from error


def _received(tensor: Tensor, differentiates: bool) -> Tensor:
    """What the next layer gets: needs a gradient if this one's output did, or layers before it."""
    needs = tensor.requires_grad or (differentiates and tensor.is_floating_point())
    return tensor.requires_grad_(needs)
