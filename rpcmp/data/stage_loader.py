"""What a stage reads of mini-batches that it loads itself.

driver: "you will be asked for 5, 6, 7" ──expect──> loaded in the background
a forward needs a slice of 5             ──get────> a copy of its own, once 5 is there

The processes in which a stage loads samples, as the worker sees them.

Never in the worker: there a model draws from the same generators as a random transform. They are
forked from it before it has threads, so nothing is imported anew, and build their datasets while
the worker builds the stage.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.config.topology import Reference
from rpcmp.data import loader_process
from rpcmp.data.loader_process import Parts
from rpcmp.errors import JobError, RpcmpError, StageError, WorkerDiedError, from_wire, to_wire
from rpcmp.pipelining import microbatch
from rpcmp.pipelining.inflight import STEPS_AHEAD
from rpcmp.process import interpreter
from rpcmp.rpc import transport
from rpcmp.rpc.messages import BatchIndices, Bundle, DatasetInfo, MicrobatchMeta, StageOutputs
from rpcmp.rpc.tensors import Handoff
from rpcmp.rpc.transport import NOBODY, Raised

END_SECONDS = 1.0
"""How long it may take to learn how a process ended that has hung up."""


class _Loader(NamedTuple):
    process: ForkProcess
    connection: socket.socket
    handoff: Handoff


class LoaderPool:
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

    def holding(self) -> DatasetInfo:
        """What they have built; waits until they have, and is to be asked once.

        Raises:
            ConfigError: a dataset cannot be built here.
            WorkerDiedError: one of them has ended.
        """
        answers = [self._receive(loader) for loader in self._all]
        for answer in answers:
            if "error" in answer:
                raise from_wire(answer["error"])
        return DatasetInfo(platform.node(), answers[0]["sizes"])

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

    def load(self, drawn: BatchIndices, done: Callable[[Parts | RpcmpError], None]) -> None:
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

    def _attempt(self, drawn: BatchIndices) -> Parts | RpcmpError:
        try:
            answer = self._ask([drawn.dataset, *drawn.place, drawn.samples])
            return loader_process.unpacked(self._references, answer)
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
            f"(pid {loader.process.pid}) {interpreter.describe_exit(loader.process.exitcode)}"
        )

    def _fork(self, config: Config) -> _Loader:
        ours, theirs = socket.socketpair()
        parent_pid = os.getpid()

        def run() -> None:
            for end in (ours, *(loader.connection for loader in self._all)):
                end.close()  # without a shutdown: they are the worker's
            loader_process.serve(Handoff(theirs), parent_pid, config, self._stage)

        process = get_context("fork").Process(target=run, name="rpcmp-data")
        with theirs:
            process.start()
        return _Loader(process, ours, Handoff(ours))


@dataclass
class _MiniBatch:
    """One that is loaded, or will be.

    Attributes:
        parts: what of it the stage reads, or why it could not be loaded.
        round: the round that works on it; 0: none so far.
    """

    parts: Future[Parts | RpcmpError] = field(default_factory=Future)
    round: int = 0


class StageDataLoader:
    """The mini-batches that a stage loads, from when they are announced to when they are done.

    Thread-safe.

    Args:
        loaders: which load them.

    Attributes:
        holding: what they have built; set by `wait`.
    """

    def __init__(self, loaders: LoaderPool) -> None:
        self.holding: DatasetInfo | None = None
        self._loaders = loaders
        self._lock = threading.Lock()
        self._mini_batches: dict[int, _MiniBatch] = {}
        self._aborted_round = 0

    def __len__(self) -> int:
        return len(self._mini_batches)

    def wait(self) -> None:
        """Return when all datasets are built.

        Raises:
            ConfigError: one cannot be built here.
        """
        self.holding = self._loaders.holding()

    def order(self, epoch: int) -> Future[Any]:
        """The indices of an epoch's samples, or a Raised."""
        answer: Future[Any] = Future()

        def done(found: Tensor | RpcmpError) -> None:
            answer.set_result(Raised(to_wire(found)) if isinstance(found, RpcmpError) else found)

        self._loaders.order(epoch, done)
        return answer

    def expect(self, drawn: Sequence[BatchIndices]) -> None:
        """Load these mini-batches, one after the other."""
        for each in drawn:
            with self._lock:
                mini_batch = self._mini_batch(each.number)
            self._loaders.load(each, mini_batch.parts.set_result)

    def get(self, bundle: Bundle, reference: Reference) -> Future[Any]:
        """Outputs, one for each micro-batch of a bundle, or a Raised; copies at every call.

        The mini-batch may be announced later: messages overtake each other.
        """
        mini_batch = self._needed(bundle)
        answer: Future[Any] = Future()

        def loaded(found: list[Any]) -> None:
            answer.set_result(_slices(found[0], bundle.works, reference))

        transport.when_all([(NOBODY, mini_batch.parts)], loaded)
        return answer

    def skip(self, bundle: Bundle) -> None:
        """Hear of a round whose bundles are all for other replicas."""
        self._needed(bundle)

    def forget(self, last: int) -> None:
        """Let go of all: the rounds up to `last` were aborted, and what comes is announced again.

        Whoever asks for them even so, since the abort has overtaken the question, gets an error.
        """
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)
            self._mini_batches.clear()

    def _needed(self, bundle: Bundle) -> _MiniBatch:
        with self._lock:
            if bundle.round <= self._aborted_round:  # nobody would load it
                aborted = _MiniBatch()
                aborted.parts.set_result(JobError(f"step {bundle.step} was aborted"))
                return aborted
            mini_batch = self._mini_batch(bundle.works[0].drawn)
            mini_batch.round = bundle.round
            self._let_go_before(bundle.round)
        return mini_batch

    def _mini_batch(self, number: int) -> _MiniBatch:
        return self._mini_batches.setdefault(number, _MiniBatch())

    def _let_go_before(self, current: int) -> None:
        """No round begins before all is done that lies STEPS_AHEAD rounds before it."""
        done = range(1, current - STEPS_AHEAD + 1)
        for number in [n for n, each in self._mini_batches.items() if each.round in done]:
            del self._mini_batches[number]


def _slices(
    parts: Parts | RpcmpError, works: Sequence[MicrobatchMeta], reference: Reference
) -> Any:
    if isinstance(parts, StageError):  # which does not know the step
        parts = StageError(**{**parts.fields, "step": works[0].step})
    if isinstance(parts, RpcmpError):
        return Raised(to_wire(parts))
    whole = parts[reference]
    return [
        StageOutputs(microbatch.cut(whole, work.num_microbatches, work.microbatch))
        for work in works
    ]
