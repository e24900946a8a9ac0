"""Runs whose layers move between stages after given steps."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpcmp.config.loader import load_config
from rpcmp.errors import InterruptedJobError
from rpcmp.job.server_pool import forks_for
from rpcmp.job.training_run import TrainingRun, order_to_train
from rpcmp.observability.events import Event, GenerationEvent, RebalanceEvent, StepEvent
from tests.support.processes import Result


def train(
    path: Path,
    moves: Mapping[int, list[int]],
    *settings: str,
    connect: Sequence[str] | None = None,
    on_generation: Callable[[GenerationEvent], None] | None = None,
    after_step: Callable[[StepEvent], object] | None = None,
    until: Callable[[Event], bool] = lambda event: False,
    predicted: Mapping[str, Any] | None = None,
) -> Result:
    """Run a job to its end, with another balance after some of the steps.

    Args:
        moves: the balances to go on with, by the steps after whose events they are asked for, or
            after that of a later one, once the layers have moved that were asked for before.
        settings: of the config, "KEY=VALUE".
        after_step: called with each step; if it returns True, the run is interrupted.
        until: whether the run is interrupted after an event; by default it runs to its end.
        predicted: keys of the config that are predicted to be faster than its own.
        on_generation: called once a generation has formed, before it does anything.
    """
    left, events = dict(moves), list[dict[str, Any]]()
    is_moving = False

    async def run() -> None:
        config, order = load_config(path, settings), order_to_train()
        if predicted is not None:
            order["options"] = [config.options.model_copy(update=predicted).model_dump()]
        async with forks_for(config, connect) as forks:
            training = TrainingRun(config, connect, report, "fresh", forks)

            def move(event: Event) -> None:
                nonlocal is_moving
                if isinstance(event, RebalanceEvent):
                    is_moving = False
                is_due = isinstance(event, StepEvent) and any(step <= event.step for step in left)
                if is_due and not is_moving:
                    is_moving = True
                    training.rebalance(left.pop(min(left)), "asked for")
                is_over = isinstance(event, StepEvent) and after_step and after_step(event)

                if isinstance(event, GenerationEvent) and on_generation:
                    on_generation(event)
                if (until(event) or is_over is True) and not training.signals:
                    training.interrupt(signal.SIGINT, task)

            watchers.append(move)
            task = asyncio.ensure_future(training.train(order))
            try:
                await task
            except InterruptedJobError:
                assert training.signals
            finally:
                await training.close()

    def report(event: Event) -> None:
        events.append(json.loads(json.dumps(event.to_json())))
        for watcher in watchers:
            watcher(event)

    watchers: list[Any] = []
    asyncio.run(run())
    return Result(0, "\n".join(map(json.dumps, events)), "")


def moved(result: Result) -> list[tuple[str, list[int], list[int]]]:
    """Return the outcome of each change, with the balance after and before it."""
    changes = [event for event in result.events if event["event"] == "rebalance"]
    return [(event["outcome"], event["balance"], event["before"]) for event in changes]
