"""A job that stops early and saves its best step, for tests/cluster and tests/long.

after step   2      4      6      8      10     12
fit.r2     -0.72  -1.76  -0.62   0.02  -1.35  -1.42      best: 8; patience 2: over after 12
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.faults import Faults
from tests.support.processes import Result, unstamped

BEST, LAST = 8, 12

SECTIONS = """
[metrics]
error = "measures:error"
fit = { callable = "measures:Fit" }
[early_stopping]
metric = "fit.r2"
patience = 2
[checkpoint]
dir = "saved"
every_steps = 5
keep = 1
best = "fit.r2"
[data]
train = "zoo:regression"
test = { callable = "zoo:regression", kwargs = { samples = 23 } }
batch_size = 10
"""

FAST = [
    part
    for override in ("optimizer.kwargs.lr=0.02", "scheduler.kwargs.gamma=1.0", "seed=22")
    for part in ("--set", override)
]


def config(faults: Faults) -> Path:
    return faults.config("steps = 40\nevaluate_every_steps = 2", stages=2, sections=SECTIONS)


def decided(result: Result) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return every evaluation, the reason for an early end if there is one, and the best step."""
    evaluations, stops = (
        [unstamped(event) for event in result.events if event["event"] == kind]
        for kind in ("eval", "early_stop")
    )
    best = result.event("summary")["best"]
    return evaluations, stops, {**best, "path": Path(best["path"]).name}
