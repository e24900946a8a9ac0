"""Hosts to plan with, whose layers take given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.pipelining.partition import HostProfile, LayerProfile
from rpcmp.pipelining.plan import PlanHost
from tests.support import profiles


def planned_job(**keys: Any) -> Config:
    """Return a job of layers with 4 micro-batches."""
    defaults = {
        "loss": "torch.nn:MSELoss",
        "num_microbatches": 4,
        "schedule": "1f1b",
        "max_in_flight": 8,
        "microbatches_per_message": 1,
        "model": {"layers": "zoo:mlp"},
        "data": {"train": "zoo:regression", "batch_size": 8},
    }
    return parse_config(defaults | keys)


def layer(seconds: float, *, kept: int = 0, held: int = 0, received: int = 0) -> LayerProfile:
    """Return a layer that needs as little as is not said; see `profiles.layer`."""
    return profiles.layer(seconds, kept, held, received)


def profile(layers: Sequence[LayerProfile], base: int = 0) -> HostProfile:
    return HostProfile(layers=list(layers), base_bytes=base, available_bytes=None)


def hosts(
    *seconds: float, layers: int = 8, limit: int | None = None, **sizes: int
) -> list[PlanHost]:
    """Return a host for each of `seconds`, which is what a micro-batch takes in a layer there."""
    return [
        PlanHost(f"host{i}:1", profile([layer(each, **sizes)] * layers), limit)
        for i, each in enumerate(seconds)
    ]
