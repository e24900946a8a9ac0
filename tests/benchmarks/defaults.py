"""Settings that a run finds by itself, next to those that a case of `rpcmp bench` was tuned to.

    python -m tests.benchmarks.defaults [--pairs N] [--steps N] [CASE or CONFIG[:STAGES] ...]

Each round is three runs: with what the case gives, tuned by hand, with the former defaults, and
with "auto" for all of it. The last steps of each count, when a run has settled.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import Any

from rpcmp.config.schema import Config
from rpcmp.job.training_run import drive
from rpcmp.observability.events import Event, ScheduleEvent, StepEvent
from rpcmp.tools.bench import cases
from rpcmp.tools.measurement import paired_ratio

CASES = ("sleep:4", "overhead:2", "overhead:4", "transformer:2", "activations:2", "activations:4")
LAST = 30
"""Steps that count."""

AUTO = {"schedule": "auto", "max_in_flight": "auto", "microbatches_per_message": "auto"}
FORMER = {"schedule": "1f1b", "max_in_flight": None, "microbatches_per_message": 1}
"""The defaults before there was "auto"."""


def run(config: Config, steps: int, keys: dict[str, Any]) -> tuple[float, str]:
    """Return the median seconds of the last steps, and what the run has chosen."""
    times: list[float] = []
    chosen = ""

    def report(event: Event) -> None:
        nonlocal chosen
        if isinstance(event, StepEvent):
            times.append(event.step_s)
        if isinstance(event, ScheduleEvent):
            chosen = f"{event.chosen} after step {event.step}"

    update = {"steps": steps, "epochs": None, "ui": None, **keys}
    asyncio.run(drive(config.model_copy(update=update), report, evaluate=False))
    return median(times[-LAST:]), chosen


def compare(name: str, pairs: int, steps: int) -> None:
    case, _, stages = name.partition(":")
    config = cases.load(case, int(stages) if stages else None).config
    by_hand, own, former = [], [], []
    chosen = []
    for _ in range(pairs):
        by_hand.append(run(config, steps, {})[0])
        former.append(run(config, steps, FORMER)[0])
        seconds, words = run(config, steps, AUTO)
        own.append(seconds)
        chosen.append(words)
    print(f"{name}: by hand {median(by_hand) * 1e3:.1f} ms")
    for words, theirs in (("by hand", by_hand), ("the former defaults", former)):
        ratio = paired_ratio(own, theirs)
        print(f"  auto / {words}: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    print(f"  chosen: {'; '.join(chosen)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=CASES)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for name in arguments.names:
        compare(name, arguments.pairs, arguments.steps)


if __name__ == "__main__":
    main()
