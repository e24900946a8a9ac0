"""Hosts to plan with, whose layers take given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.job import segments
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.partition import HostProfile, LayerProfile, bounds
from rpcmp.pipelining.plan import Connection, Constraints, Plan, PlanHost
from rpcmp.pipelining.planner import Planner, Timed
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


def plans(
    given: list[PlanHost],
    links: dict[tuple[str, str], Connection] | None = None,
    constraints: Constraints | None = None,
    **keys: Any,
) -> list[Plan]:
    """Return the plans of `planned_job`, with what is not given as it is there."""
    return Planner(planned_job(**keys), StageConfig(), given, links or {}, constraints).plans()


def served_by(plan: Plan) -> list[str]:
    """Return the addresses of a plan's stages, in order."""
    return [stage.address for stage in plan.stages]


def trained_on(truth: Planner, timed: Timed) -> MeasuredSteps:
    """Return the steps of a plan on hosts that are as another planner takes them to be."""
    estimates, chain = truth.estimates, timed.chain
    busy = {}
    for number, (host, part) in enumerate(zip(chain.hosts, bounds(chain.balance), strict=True)):
        layers = estimates.hosts[host].profile.layers[slice(*part)]
        busy[f"stage{number}"] = {
            "F": sum(4 * each.forward_s for each in layers),
            "B": sum(4 * each.backward_s for each in layers),
            "W": sum(4 * each.weight_s for each in layers),
            "O": sum(each.update_s for each in layers),
        }
    return MeasuredSteps(estimates.step_seconds(chain, timed.options), 0.0, busy)


def shorten_rehearsals(patch: pytest.MonkeyPatch) -> None:
    """Let a rehearsal in this process be one block of the fewest steps."""
    patch.setattr(segments, "BLOCK_SECONDS", 0.0)
    patch.setattr(segments, "MOST_SECONDS", 0.0)


def hosts(
    *seconds: float, layers: int = 8, limit: int | None = None, **sizes: int
) -> list[PlanHost]:
    """Return a host for each of `seconds`, which is what a micro-batch takes in a layer there."""
    return [
        PlanHost(f"host{i}:1", profile([layer(each, **sizes)] * layers), limit)
        for i, each in enumerate(seconds)
    ]
