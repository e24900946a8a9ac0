"""Measured times and sizes of a model's layers on one host, as its stage server sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rpcmp.config.schema import Config
from rpcmp.config.types import Strict

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class ProfileOrder(Strict):
    """A request to measure all layers on a host, as one stage.

    Attributes:
        config: the job with one stage, which has the settings of the stage to measure.
        differentiates: whether a frozen layer has to compute input gradients nevertheless, for
            layers before it on other hosts.
    """

    config: Config
    differentiates: bool


class LayerProfile(Strict):
    """One layer on one host. Times and activations are those of one micro-batch.

    Attributes:
        forward_s, backward_s, weight_s: seconds of the forward, the input gradient and the weight
            gradient; the last layer's include the loss.
        update_s: seconds of the optimizer's step.
        state_bytes: parameters, buffers, gradients and optimizer state.
        activation_bytes: saved tensors of the backward and the output, without the input.
        input_bytes: the layer's input.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    update_s: Seconds
    state_bytes: Bytes
    activation_bytes: Bytes
    input_bytes: Bytes


class HostProfile(Strict):
    """All layers on one host.

    Attributes:
        layers: all layers of the model, in order.
        base_bytes: a worker's memory without layers.
        available_bytes: the device's memory for all workers together; None if unknown.
    """

    layers: list[LayerProfile] = Field(min_length=1)
    base_bytes: Bytes
    available_bytes: Bytes | None


def merge_profiles(replicas: Sequence[HostProfile], shares: Sequence[float]) -> HostProfile:
    """Merge the hosts of a stage's replicas into one that is as slow as the slowest of them.

    Each replica steps its own optimizer, and holds the whole stage in memory.

    Args:
        replicas: profiles of the same layers.
        shares: each one's share of a step's micro-batches; together 1.
    """
    last, share = max(
        zip(replicas, shares, strict=True), key=lambda each: each[1] * profile_seconds(each[0])
    )
    layers = [
        LayerProfile(
            forward_s=share * slowest.forward_s,
            backward_s=share * slowest.backward_s,
            weight_s=share * slowest.weight_s,
            update_s=max(layer.update_s for layer in each),
            state_bytes=max(layer.state_bytes for layer in each),
            activation_bytes=max(layer.activation_bytes for layer in each),
            input_bytes=max(layer.input_bytes for layer in each),
        )
        for slowest, *each in zip(
            last.layers, *(replica.layers for replica in replicas), strict=True
        )
    ]
    available = [one.available_bytes for one in replicas if one.available_bytes is not None]
    return HostProfile(
        layers=layers,
        base_bytes=max(replica.base_bytes for replica in replicas),
        available_bytes=min(available, default=None),
    )


def profile_seconds(host: HostProfile) -> float:
    """Return the seconds of one micro-batch in all layers."""
    return sum(layer.forward_s + layer.backward_s + layer.weight_s for layer in host.layers)
