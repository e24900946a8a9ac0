"""Figures of simulated steps that only tests read."""

from __future__ import annotations

from rpcmp.pipelining.schedule import Action
from rpcmp.pipelining.simulation import Simulation


def idle_share(run: Simulation, stage: str) -> float:
    """Return the share of the makespan in which a stage idles: its bubble."""
    busy = sum(each.end - each.start for each in run.runs[stage])
    return 1.0 - busy / run.makespan if run.makespan else 0.0


def most_held(run: Simulation, stage: str, until: Action) -> int:
    """Return the most micro-batches that a stage held from forward to the end of `until`.

    A whole backward includes the weight gradient.
    """
    until = until if run.limits[stage].splits else Action.BACKWARD
    held = most = 0
    for each in run.runs[stage]:
        held += {Action.FORWARD: 1, until: -1}.get(each.action, 0)
        most = max(most, held)
    return most
