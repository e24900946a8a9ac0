"""Layers and hosts as if they had been measured."""

from __future__ import annotations

from rpcmp.pipelining.partition import HostProfile, LayerProfile, StageHost


def layer(
    seconds: float = 1.0, state: int = 0, activations: int = 0, received: int = 1
) -> LayerProfile:
    """Return a layer that computes for `seconds` per micro-batch, half of them in the backward.

    Args:
        state, activations, received: bytes of its state, its activations and its input.
    """
    return LayerProfile(
        forward_s=seconds / 2,
        backward_s=seconds / 4,
        weight_s=seconds / 4,
        update_s=0,
        state_bytes=state,
        activation_bytes=activations,
        input_bytes=received,
    )


def host(
    layers: list[LayerProfile], index: int = 0, limit: int | None = None, **settings: int
) -> StageHost:
    profile = HostProfile(layers=layers, base_bytes=10, available_bytes=None)
    counts = {"num_microbatches": 1, "held": 1} | settings
    return StageHost(f"stage{index}", profile, limit, counts["num_microbatches"], counts["held"])
