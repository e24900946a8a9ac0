"""The processes that load mini-batches for a stage, and how its worker asks them.

Samples are never loaded in the worker, where a model draws from the same generators as a random
transform. The processes are forked before the worker has threads, so they inherit its imports, and
build their datasets while the worker builds the stage; see `loader_process`.
"""

from __future__ import annotations

import errno
import os
import pickle
import platform
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.config.topology import Reference
from rpcmp.data import loader_process, loss_weights
from rpcmp.data.loader_process import Message, stage_error
from rpcmp.errors import RpcmpError, WorkerDiedError, from_wire
from rpcmp.pipelining import microbatches, pytree
from rpcmp.process import interpreter
from rpcmp.rpc.messages import BatchIndices, DatasetInfo, LossWeight, RoundHeader
from rpcmp.rpc.tensors import Handoff

T = TypeVar("T")

END_SECONDS = 1.0
"""Longest wait for the exit code of a process that has closed its connection."""


class Parts(NamedTuple):
    """What a stage reads of a mini-batch.

    Attributes:
        trees: a tree of tensors per reference.
        weights: what the loss counts in the targets of each micro-batch; empty: samples.
        position: of a stream, after this mini-batch, as text.
    """

    trees: dict[Reference, Any]
    weights: list[LossWeight]
    position: str


class _Loader(NamedTuple):
    process: ForkProcess
    connection: socket.socket
    handoff: Handoff
    thread: ThreadPoolExecutor


class LoaderPool:
    """The processes that load what one stage reads; created before this process has threads."""

    def __init__(self, config: Config, stage: str) -> None:
        section = config.require_data("loading samples at a stage")
        self._config = config
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._all: list[_Loader] = []
        for _ in range(section.num_loaders):
            self._all.append(self._fork(config))

    def holding(self) -> DatasetInfo:
        """Wait until the datasets are built, and return their sizes; called once."""
        answers = [self._receive(loader) for loader in self._all]
        for answer in answers:
            if "error" in answer:
                raise from_wire(answer["error"])
        info = DatasetInfo(platform.node(), answers[0]["sizes"], answers[0]["streams"])
        if "train" in info.streams:
            self._keep_one()
        return info

    def _keep_one(self) -> None:
        """Keep one process, which reads mini-batch after mini-batch, with processes of its own."""
        while len(self._all) > 1:
            loader = self._all.pop()
            loader.handoff.close()
            loader.process.join(END_SECONDS)

    @property
    def pids(self) -> list[int]:
        return [loader.process.pid or 0 for loader in self._all]

    def close(self) -> None:
        for loader in self._all:
            loader.thread.shutdown(wait=False, cancel_futures=True)
            loader.handoff.close()
        for loader in self._all:
            loader.process.join(END_SECONDS)

    def load(self, drawn: BatchIndices, done: Callable[[Parts | RpcmpError], None]) -> None:
        """Load a mini-batch, and call `done` from another thread.

        Processes take turns, like torch's, and each loads in the order of the calls: a dataset that
        keeps something from sample to sample, such as a generator, gives the same in every run.
        """
        loader = self._all[drawn.batch_id % len(self._all)]

        def load() -> Parts:
            return _unpacked(self._references, self._ask(loader, list(drawn[1:])))

        self._submit(loader, load, done)

    def weigh(self, targets: Any, header: RoundHeader) -> list[LossWeight]:
        """Weigh a mini-batch that was announced for another number of micro-batches.

        Only `rpcmp tune` does so: it changes that number between two steps.
        """
        sliced = microbatches.split(targets, header.num_microbatches)
        weights = loss_weights.LossWeights(self._config)
        where = f"step {header.step}"
        return loss_weights.shares(weights.of(sliced, where, header.is_training))

    def order(self, epoch: int, done: Callable[[Tensor | RpcmpError], None]) -> None:
        """Draw the order of an epoch, and call `done` from another thread."""
        loader = self._all[0]
        self._submit(loader, lambda: self._ask(loader, [epoch])["indices"], done)

    def _submit(
        self, loader: _Loader, load: Callable[[], T], done: Callable[[T | RpcmpError], None]
    ) -> None:
        def run() -> None:
            try:
                loaded: T | RpcmpError = load()
            except RpcmpError as error:
                loaded = error
            except BaseException as error:  # such as a named tuple's class that this process lacks
                loaded = stage_error(self._stage, error)
            done(loaded)

        loader.thread.submit(run)

    def _ask(self, loader: _Loader, request: list[Any]) -> Any:
        try:
            loader.handoff.send(request)
            answer = self._receive(loader)
        except OSError as error:
            raise self._lost(loader, error) from None
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer

    def _receive(self, loader: _Loader) -> Any:
        try:
            return loader.handoff.receive()
        except (OSError, EOFError) as error:
            raise self._lost(loader, error) from None

    def _lost(self, loader: _Loader, error: OSError | EOFError) -> WorkerDiedError:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return WorkerDiedError(
                f"the worker of stage {self._stage!r} on {platform.node()} cannot take the samples "
                f"that were loaded for it: {error.strerror}; raise its limit (`ulimit -n`)"
            )
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
        return _Loader(process, ours, Handoff(ours), ThreadPoolExecutor(1, "rpcmp-loader"))


def _unpacked(references: Sequence[Reference], answer: Message) -> Parts:
    """Return the parts of a mini-batch in a process's answer."""
    leaves = iter(answer["leaves"])
    trees = pickle.loads(bytes.fromhex(answer["trees"]))
    parts = pytree.map_leaves(lambda _: next(leaves), trees)
    weights = loss_weights.shares(answer["weights"])
    return Parts(dict(zip(references, parts, strict=True)), weights, answer["position"])
