"""Driving a job from its config to its summary: the one function behind `rpcmp drive`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rpcmp.balance.prediction import Prediction
from rpcmp.config import Config
from rpcmp.errors import DrainingError, InterruptedJobError
from rpcmp.job.balancing import balanced
from rpcmp.job.session import Session
from rpcmp.process.channel import Message

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def drive(
    config: Config,
    report: Callable[[Message], None],
    connect: Sequence[str] | None = None,
    evaluate: bool = True,
    save_state: Path | None = None,
    trace: Path | None = None,
) -> Message:
    """Train `config` to its end.

    The first SIGINT or SIGTERM lets the running step finish, the second ends the job at once.

    Args:
        config: the job.
        report: told of every event: plan (of a balance that was measured), start, step, eval,
            report, summary.
        connect: addresses of running stage servers; see Session.
        evaluate: evaluate and write the report as well.
        save_state: where to save the final parameters and buffers, as safetensors.
        trace: where to write a trace of the run.

    Returns:
        The summary event.

    Raises:
        RpcmpError: why the job did not come to its end; InterruptedJobError for a signal.
    """
    run = _Run(config, connect, report)
    task = asyncio.ensure_future(run.train(_order(evaluate, save_state, trace)))
    with _signals(lambda signum: run.interrupt(signum, task)):
        try:
            return await task
        except asyncio.CancelledError:
            if not run.signals:
                raise
            raise InterruptedJobError(run.signals[-1], run.step) from None
        finally:
            await run.close()


def _order(evaluate: bool, save_state: Path | None, trace: Path | None) -> Message:
    """What the driver's process is told; paths as seen from this process."""
    files = {"save_state": save_state, "trace": trace}
    paths = {key: str(path.absolute()) if path else "" for key, path in files.items()}
    return {"op": "train", "evaluate": evaluate, **paths}


class _Run:
    """One run, as far as it has come."""

    def __init__(
        self, config: Config, connect: Sequence[str] | None, report: Callable[[Message], None]
    ) -> None:
        self._config, self._connect = config, connect
        self._report = report
        self._session: Session | None = None
        self._training = False
        self._draining = ""
        self._step_seconds: list[float] = []
        self.step = 0
        self.signals: list[int] = []

    async def train(self, order: Message) -> Message:
        config, prediction = await balanced(self._config, self._connect)
        if prediction is not None:
            self._report({"event": "plan", **asdict(prediction)})
        session = Session(config, self._connect)
        self._session = session
        await session.start()
        session.send(order)
        self._training = True
        summary: Message = {}
        while (event := await session.next_event())["event"] != "done":
            match event["event"]:
                case "step":
                    self.step = event["step"]
                    self._step_seconds.append(event["step_s"])
                case "summary":
                    summary = event
                    if prediction is not None:
                        event["plan"] = self._compare(prediction)
                case "draining":
                    self._draining = event["stage"]
                    session.send({"op": "finish_step"})
                    continue
            self._report(event)
        await session.wait_for_end()
        if self._draining:
            raise DrainingError(
                f"the server of stage {self._draining!r} is being stopped; the job ended after "
                f"step {self.step}"
            )
        if self.signals:
            raise InterruptedJobError(self.signals[0], self.step)
        return summary

    def interrupt(self, signum: int, task: asyncio.Future[Message]) -> None:
        """The first signal while training ends the run after its step, any other at once."""
        self.signals.append(signum)
        if len(self.signals) == 1 and self._session is not None and self._training:
            self._session.send({"op": "finish_step"})
        else:
            task.cancel()

    async def close(self) -> None:
        """Free all servers."""
        if self._session is not None:
            await self._session.close()

    def _compare(self, prediction: Prediction) -> Message:
        """The median leaves out the first step, which warms up."""
        counted = self._step_seconds[1:] or self._step_seconds
        return {
            "balance": prediction.balance,
            "predicted_step_s": prediction.step_s,
            "measured_step_s": statistics.median(counted) if counted else None,
        }


@contextlib.contextmanager
def _signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `handler` within the block."""
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, handler, signum)
    try:
        yield
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)
