"""The pipeline diagram of a step as the page gets it: whole microseconds from the step's begin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rpcmp.page.values import plain
from rpcmp.process.channel import Message


def timeline(event: Message) -> dict[str, Any]:
    """The event `timeline` with its spans as [kind, micro-batch, start, end] and its idle times as
    [loss, start, end], both in microseconds."""
    stages = event["stages"]
    starts = [span[-2] for stage in stages for span in (*stage["spans"], *stage.get("idle", ()))]
    begin = min(starts, default=0.0)
    return {
        "step": event["step"],
        "seconds": plain(event["seconds"]),
        "bottleneck": str(event.get("bottleneck") or ""),
        "stages": [
            {
                "label": stage["label"],
                "host": stage.get("host", ""),
                "busy": plain(stage.get("busy", {})),
                "lost": plain(stage.get("lost", {})),
                "spans": [*_shifted(stage["spans"], begin)],
                "idle": [*_shifted(stage.get("idle", ()), begin)],
            }
            for stage in stages
        ],
    }


def _shifted(spans: Iterable[Any], begin: float) -> Iterable[list[Any]]:
    for *what, start, end in spans:
        yield [*what, round((start - begin) * 1e6), round((end - begin) * 1e6)]
