"""What was measured of a model's layers on one host; travels as JSON from its stage server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rpcmp.config.schema import Config
from rpcmp.config.types import Strict

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class ProfileOrder(Strict):
    """What a host is asked to measure: all layers, as one stage.

    Attributes:
        config: the job with that one stage, which has the settings of the stage in question.
        differentiates: whether a layer that trains nothing has to compute input gradients all the
            same, for layers before it on other hosts.
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
        activation_bytes: what the backward needs, and the output; without the layer's input.
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
        layers: of the whole model, in order.
        base_bytes: what a worker takes up there whatever its layers are.
        available_bytes: what the device has for all workers together; None where nobody knows.
    """

    layers: list[LayerProfile] = Field(min_length=1)
    base_bytes: Bytes
    available_bytes: Bytes | None


def merge_profiles(replicas: Sequence[HostProfile], shares: Sequence[float]) -> HostProfile:
    """Hosts that share a stage's micro-batches, as one that ends a step when the last of them does.

    Each steps its own optimizer, and has the whole stage in its memory.

    Args:
        replicas: the same layers on each.
        shares: of a step's micro-batches that each computes; together 1.
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
    """What one micro-batch takes there, if the host has all layers."""
    return sum(layer.forward_s + layer.backward_s + layer.weight_s for layer in host.layers)
