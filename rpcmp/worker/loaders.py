"""The processes in which a stage loads samples, as the worker sees them.

Never in the worker: there a model draws from the same generators as a random transform. They are
forked from it before it has threads, so nothing is imported anew, and build their datasets while
the worker builds the stage.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch

from rpcmp.config import Config
from rpcmp.errors import RpcmpError, WorkerDiedError, from_wire
from rpcmp.handoff import Handoff
from rpcmp.process import exitcode
from rpcmp.work import Drawn, Holding
from rpcmp.worker import loading
from rpcmp.worker.loading import Parts

END_SECONDS = 1.0
"""How long it may take to learn how a process ended that has hung up."""


class _Loader(NamedTuple):
    process: ForkProcess
    connection: socket.socket
    handoff: Handoff


class Loaders:
    """The processes that load what one stage reads; made before this process has threads.

    Args:
        config: the job.
        stage: the name of the stage, which reads some of the batch.

    Raises:
        ConfigError: the job has no `[data]`.
    """

    def __init__(self, config: Config, stage: str) -> None:
        section = config.require_data("loading samples at a stage")
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._all: list[_Loader] = []
        for _ in range(section.num_loaders):
            self._all.append(self._fork(config))
        self._idle: queue.SimpleQueue[_Loader] = queue.SimpleQueue()
        for loader in self._all:
            self._idle.put(loader)
        self._threads = ThreadPoolExecutor(len(self._all), "rpcmp-loader")

    def holding(self) -> Holding:
        """What they have built; waits until they have, and is to be asked once.

        Raises:
            ConfigError: a dataset cannot be built here.
            WorkerDiedError: one of them has ended.
        """
        answers = [self._receive(loader) for loader in self._all]
        for answer in answers:
            if "error" in answer:
                raise from_wire(answer["error"])
        return Holding(platform.node(), answers[0]["sizes"])

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [loader.process.pid or 0 for loader in self._all]

    def close(self) -> None:
        """End them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for loader in self._all:
            loader.handoff.close()
        for loader in self._all:
            loader.process.join(END_SECONDS)

    def load(self, drawn: Drawn, done: Callable[[Parts | RpcmpError], None]) -> None:
        """Load a mini-batch as soon as a process is idle, and call `done` from another thread."""
        self._threads.submit(lambda: done(self._attempt(drawn)))

    def order(self, epoch: int, done: Callable[[torch.Tensor | RpcmpError], None]) -> None:
        """Draw the order of an epoch, and call `done` from another thread."""

        def attempt() -> torch.Tensor | RpcmpError:
            try:
                answer = self._ask([epoch])
                found: torch.Tensor = answer["indices"]
            except RpcmpError as error:
                return error
            return found

        self._threads.submit(lambda: done(attempt()))

    def _attempt(self, drawn: Drawn) -> Parts | RpcmpError:
        try:
            answer = self._ask([drawn.dataset, *drawn.place, drawn.samples])
            return loading.unpacked(self._references, answer)
        except RpcmpError as error:
            return error

    def _ask(self, what: list[Any]) -> Any:
        """The answer of the next process that is idle."""
        loader = self._idle.get()
        try:
            loader.handoff.send(what)
            answer = self._receive(loader)
        except OSError:
            raise self._died(loader) from None
        finally:
            self._idle.put(loader)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer

    def _receive(self, loader: _Loader) -> Any:
        try:
            return loader.handoff.receive()
        except (OSError, EOFError):
            raise self._died(loader) from None

    def _died(self, loader: _Loader) -> WorkerDiedError:
        loader.process.join(END_SECONDS)
        return WorkerDiedError(
            f"a process that loads samples for stage {self._stage!r} on {platform.node()} "
            f"(pid {loader.process.pid}) {exitcode.told(loader.process.exitcode)}"
        )

    def _fork(self, config: Config) -> _Loader:
        ours, theirs = socket.socketpair()
        parent_pid = os.getpid()

        def run() -> None:
            for end in (ours, *(loader.connection for loader in self._all)):
                end.close()  # without a shutdown: they are the worker's
            loading.serve(Handoff(theirs), parent_pid, config, self._stage)

        process = get_context("fork").Process(target=run, name="rpcmp-data")
        with theirs:
            process.start()
        return _Loader(process, ours, Handoff(ours))
