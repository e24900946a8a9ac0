"""Driving a job from its config to its summary: the one function behind `rpcmp drive`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rpcmp.config.schema import Config
from rpcmp.errors import InterruptedJobError
from rpcmp.job.restore_planner import Start
from rpcmp.job.run import TrainingRun
from rpcmp.job.server_pool import forks_for
from rpcmp.observability.events.definitions import SummaryEvent
from rpcmp.observability.events.event import Event
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks
from rpcmp.process.signals import count_stop_requests, handle_stop_signals


async def drive(
    config: Config,
    report: Callable[[Event], None],
    connect: Sequence[str] | None = None,
    evaluate: bool = True,
    save_state: Path | None = None,
    trace: Path | None = None,
    start: Start = "either",
    timeline: float = 0.0,
    last_steps: Path | None = None,
    forks: Forks | None = None,
) -> SummaryEvent:
    """Train `config` to its end, whatever is lost on the way.

    The first SIGINT, SIGTERM or SIGHUP lets the running step finish, another SIGINT or SIGTERM ends
    the job at once.

    Args:
        config: the job.
        report: gets every event from `RunEvent` to `SummaryEvent`, stamped, and about once a second
            `VitalsEvent`; see rpcmp.observability.events.definitions.
        connect: addresses of running stage servers; see ServerPool.
        evaluate: evaluate and write the report as well.
        save_state: where to save the final parameters and buffers, as safetensors.
        trace: where to write a trace of the run.
        start: "resume": go on from the newest checkpoint, where there is one; "fresh": begin anew,
            whatever there is; "either": that too, unless a config has asked for what is there.
        timeline: seconds between two events `timeline`, which say what a step looks like; 0: none.
        last_steps: where to write a trace of the last steps at the end of the run; needs
            `timeline`.
        forks: where processes come from; None: one for this run alone.

    Returns:
        The last event, `SummaryEvent`.

    Raises:
        RpcmpError: why the job did not come to its end; InterruptedJobError for a signal.
    """
    own = forks_for(config, connect) if forks is None else contextlib.nullcontext(forks)
    async with own as processes:
        run = TrainingRun(config, connect, report, start, processes)
        files = {"save_state": save_state, "trace": trace, "last_steps": last_steps}
        task = asyncio.ensure_future(run.train(_order(evaluate, timeline, files)))
        with handle_stop_signals(lambda signum: run.interrupt(signum, task)):
            try:
                return await task
            except asyncio.CancelledError:
                if not run.signals:
                    raise
                if count_stop_requests(run.signals) == 1 and run.saves_on(
                    run.signals[0]
                ):  # between two generations: there is no step to end
                    await run.leave()
                raise InterruptedJobError(run.signals[-1], run.step) from None
            finally:
                await run.close()


def _order(evaluate: bool, timeline: float, files: Mapping[str, Path | None]) -> Message:
    """What the driver's process is told; paths as seen from this process."""
    paths = {key: str(path.absolute()) if path else "" for key, path in files.items()}
    return {"op": "train", "evaluate": evaluate, "timeline": timeline, **paths}
