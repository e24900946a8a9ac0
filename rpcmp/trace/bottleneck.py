"""What to change first: the stage that computes longest, and what else makes steps longer.

A stage's own idle time does not tell: while one waits for the network, all behind it have a bubble.
So waiting is measured on the critical path, and a step is seen as

    busy (of the busiest stage) + network + overhead (on the path) + bubble (the rest)

where the rest is filling and draining the pipeline. What the busiest stage computes beyond the mean
of all is a loss too: stages that are not even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.trace.causes import Via
from rpcmp.trace.idle import Loss
from rpcmp.trace.path import critical_path
from rpcmp.trace.shares import Shares
from rpcmp.trace.spans import Trace
from rpcmp.trace.window import Window

NEGLIGIBLE = 0.05
"""The share of a step below which a loss is not worth advice."""

ADVICE = {
    "uneven stages": "Move layers away from {busiest}, or give it a faster host.",
    "bubble": "More micro-batches, or a schedule with fewer bubbles, fill it.",
    "waiting for network": "Let more micro-batches be in flight, send fewer bytes, or use a "
    "faster link.",
    "waiting for the driver": "Give the driver a core of its own, or a faster link; load data "
    "faster where a step's line says that it waits for data.",
    "overhead": "Fewer, larger micro-batches have less of it; so has a host with idle cores.",
}
"""What to try, by loss."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits the speed of a window.

    Attributes:
        stage: the one that computes longest; no step is shorter than that.
        busy_s: seconds that it computes in each step.
        step_s: seconds that each step took.
        loss: the largest loss, one of ADVICE.
        loss_stage: where.
        loss_share: how much of a step it takes, between 0 and 1.
        advice: a sentence that says what to try.
    """

    stage: str
    busy_s: float
    step_s: float
    loss: str
    loss_stage: str
    loss_share: float
    advice: str

    def __str__(self) -> str:
        return (
            f"bottleneck: {self.stage} computes {self.busy_s * 1e3:,.1f} ms of each step's "
            f"{self.step_s * 1e3:,.1f} ms; largest loss: {self.loss} at {self.loss_stage}, "
            f"{self.loss_share:.0%} of a step. {self.advice}"
        )


def bottleneck(trace: Trace, window: Window, shares: Sequence[Shares]) -> Bottleneck:
    """The bottleneck of `window`, given its shares; of equals, the first in the graph."""
    busiest = max(shares, key=lambda stage: stage.total_busy)
    losses = _waits(trace, window)
    bubble = max(0.0, 1 - busiest.total_busy - sum(losses.values()))
    mean_busy = sum(stage.total_busy for stage in shares) / len(shares)
    losses["uneven stages", busiest.stage] = busiest.total_busy - mean_busy
    losses["bubble", busiest.stage] = bubble
    (loss, stage), share = max(losses.items(), key=lambda item: item[1])
    advice = ADVICE[loss] if share >= NEGLIGIBLE else "Only a faster {busiest} shortens steps."
    return Bottleneck(
        stage=busiest.stage,
        busy_s=busiest.total_busy * window.step_s,
        step_s=window.step_s,
        loss=loss,
        loss_stage=stage,
        loss_share=share,
        advice=advice.format(busiest=busiest.stage),
    )


def _waits(trace: Trace, window: Window) -> dict[tuple[str, str], float]:
    """How long the critical path waits, by reason and stage, as shares of the window."""
    waits_ns: Counter[tuple[str, str]] = Counter()
    for leg in critical_path(trace, window):
        if leg.what is Loss.OVERHEAD:
            waits_ns["overhead", leg.stage] += leg.ns
        elif leg.what is Loss.NETWORK:
            sender = "the driver" if leg.via is Via.DRIVER else "network"
            waits_ns[f"waiting for {sender}", leg.stage] += leg.ns
    return {key: ns / (window.end_ns - window.begin_ns) for key, ns in waits_ns.items()}
