"""Mini-batches that a stage loads itself, and the processes that load them.

    driver announces 5, 6, 7      ──prefetch──> loaded in the background
    a forward needs a slice of 5  ──get───────> its own copy, once 5 is there

    worker ──which samples──> process ──sizes; parts of a mini-batch; an error──> worker

Samples are never loaded in the worker, where a model draws from the same generators as a random
transform. The processes are forked before the worker has threads, so they inherit its imports, and
build their datasets while the worker builds the stage.

A process answers with tensors in shared memory, and a pickle of the trees that they belong to,
since a batch may contain the user's own named tuples. The worker trusts it: it has forked it.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import platform
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from setproctitle import setproctitle
from torch import Tensor
from torch.futures import Future

from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES, Reference
from rpcmp.data import batches, loss_weights
from rpcmp.data.batches import Collate, Loaded, Samples
from rpcmp.data.sample_order import OwnSampler, sampler_of
from rpcmp.data.streams import PassReader, StreamReader
from rpcmp.errors import (
    ConfigError,
    JobError,
    RpcmpError,
    StageError,
    WorkerDiedError,
    from_wire,
    one_line,
    to_wire,
)
from rpcmp.pipelining import microbatches, pytree
from rpcmp.pipelining.cost_model import STEPS_AHEAD
from rpcmp.process import interpreter
from rpcmp.process.channel import die_with_parent
from rpcmp.rpc import transport
from rpcmp.rpc.messages import (
    BatchIndices,
    Bundle,
    DatasetInfo,
    LossWeight,
    RoundHeader,
    StageOutputs,
)
from rpcmp.rpc.tensors import Handoff
from rpcmp.rpc.transport import NOBODY, Raised

T = TypeVar("T")

TARGET = Reference(SOURCES[1])
"""The targets as the sink reads them for its loss."""

Message = dict[str, Any]


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


END_SECONDS = 1.0
"""Longest wait for the exit code of a process that has closed its connection."""


class _Loader(NamedTuple):
    process: ForkProcess
    connection: socket.socket
    handoff: Handoff


class LoaderPool:
    """The processes that load what one stage reads; created before this process has threads."""

    def __init__(self, config: Config, stage: str) -> None:
        section = config.require_data("loading samples at a stage")
        self._config = config
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._all: list[_Loader] = []
        self._idle = queue.SimpleQueue[_Loader]()
        for _ in range(section.num_loaders):
            self._all.append(self._fork(config))
            self._idle.put(self._all[-1])
        self._threads = ThreadPoolExecutor(len(self._all), "rpcmp-loader")

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
        self._idle = queue.SimpleQueue()
        self._idle.put(self._all[0])
        self._threads = ThreadPoolExecutor(1, "rpcmp-loader")  # so that they are read in order

    @property
    def pids(self) -> list[int]:
        return [loader.process.pid or 0 for loader in self._all]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for loader in self._all:
            loader.handoff.close()
        for loader in self._all:
            loader.process.join(END_SECONDS)

    def load(self, drawn: BatchIndices, done: Callable[[Parts | RpcmpError], None]) -> None:
        """Load a mini-batch as soon as a process is idle, and call `done` from another thread."""

        def load() -> Parts:
            answer = self._ask(list(drawn[1:]))
            return _unpacked(self._references, answer)

        self._submit(load, done)

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
        self._submit(lambda: self._ask([epoch])["indices"], done)

    def _submit(self, load: Callable[[], T], done: Callable[[T | RpcmpError], None]) -> None:
        def run() -> None:
            try:
                loaded: T | RpcmpError = load()
            except RpcmpError as error:
                loaded = error
            except BaseException as error:  # such as a named tuple's class that this process lacks
                loaded = _stage_error(self._stage, error)
            done(loaded)

        self._threads.submit(run)

    def _ask(self, request: list[Any]) -> Any:
        """Return the answer of the next process that is idle."""
        loader = self._idle.get()
        try:
            loader.handoff.send(request)
            answer = self._receive(loader)
        except OSError as error:
            raise self._lost(loader, error) from None
        finally:
            self._idle.put(loader)
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
            _serve(Handoff(theirs), parent_pid, config, self._stage)

        process = get_context("fork").Process(target=run, name="rpcmp-data")
        with theirs:
            process.start()
        return _Loader(process, ours, Handoff(ours))


@dataclass
class _MiniBatch:
    """A mini-batch that is loaded, or will be.

    Attributes:
        parts: what the stage reads of it, or why it could not be loaded.
        round: the round that uses it; 0 if none does yet.
    """

    parts: Future[Parts | RpcmpError] = field(default_factory=Future)
    round: int = 0


class StageDataLoader:
    """The mini-batches that a stage loads, until the end of their round. Thread-safe.

    Attributes:
        holding: sizes of the datasets; set by `wait`.
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
        """Return when all datasets are built."""
        self.holding = self._loaders.holding()

    def order(self, epoch: int) -> Future[Any]:
        """Return the indices of an epoch's samples, or a Raised."""
        answer: Future[Any] = Future()

        def done(order: Tensor | RpcmpError) -> None:
            answer.set_result(Raised(to_wire(order)) if isinstance(order, RpcmpError) else order)

        self._loaders.order(epoch, done)
        return answer

    def prefetch(self, drawn: Sequence[BatchIndices]) -> Future[Any]:
        """Load mini-batches; return a future of a stream's position after the last of them.

        For a dataset with indices it is ready at once.
        """
        for batch in drawn:
            with self._lock:
                # No round needs what has no samples: a stream that is read again.
                mini_batch = self._mini_batch(batch.batch_id) if batch.samples else _MiniBatch()
            self._loaders.load(batch, mini_batch.parts.set_result)
        answer: Future[Any] = Future()
        if self.holding is None or drawn[-1].dataset not in self.holding.streams:
            answer.set_result("")
            return answer

        def loaded(parts: list[Parts | RpcmpError]) -> None:
            (last,) = parts
            if isinstance(last, RpcmpError):
                answer.set_result(Raised(to_wire(last)))
            else:
                answer.set_result(last.position)

        transport.when_all([(NOBODY, mini_batch.parts)], loaded)
        return answer

    def get(self, bundle: Bundle, reference: Reference) -> Future[Any]:
        """Return StageOutputs per micro-batch of a bundle, or a Raised; copies at every call.

        The mini-batch may be announced later, since messages overtake each other.
        """
        answer: Future[Any] = Future()
        transport.when_all(
            [(NOBODY, self._needed(bundle.round).parts)],
            lambda parts: answer.set_result(self._slices(parts[0], bundle, reference)),
        )
        return answer

    def skip(self, header: RoundHeader) -> None:
        """Record a round whose bundles are all for other replicas."""
        self._needed(header)

    def forget(self, last: int) -> None:
        """Drop all mini-batches after the rounds up to `last` were aborted.

        What is needed later is announced again. Requests that the abort has overtaken fail.
        """
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)
            self._mini_batches.clear()

    def _slices(self, parts: Parts | RpcmpError, bundle: Bundle, reference: Reference) -> Any:
        try:
            if isinstance(parts, RpcmpError):
                raise parts
            count = bundle.round.num_microbatches
            if parts.weights and reference == TARGET and len(parts.weights) != count:
                weights = self._loaders.weigh(parts.trees[TARGET], bundle.round)
                parts = parts._replace(weights=weights)
            return _slices(parts, bundle, reference)
        except StageError as error:  # raised in a process that does not know the step
            fields = {**error.fields, "step": bundle.round.step}
            return Raised(to_wire(StageError(**fields)))
        except RpcmpError as error:
            return Raised(to_wire(error))

    def _needed(self, header: RoundHeader) -> _MiniBatch:
        with self._lock:
            if header.number <= self._aborted_round:  # it would never be loaded
                aborted = _MiniBatch()
                aborted.parts.set_result(JobError(f"step {header.step} was aborted"))
                return aborted
            mini_batch = self._mini_batch(header.batch_id)
            mini_batch.round = header.number
            self._drop_before(header.number)
        return mini_batch

    def _mini_batch(self, number: int) -> _MiniBatch:
        return self._mini_batches.setdefault(number, _MiniBatch())

    def _drop_before(self, current: int) -> None:
        """Drop rounds that are over: a round starts only after the one STEPS_AHEAD before it."""
        done = range(1, current - STEPS_AHEAD + 1)
        for number in [n for n, each in self._mini_batches.items() if each.round in done]:
            del self._mini_batches[number]


def _slices(parts: Parts, bundle: Bundle, reference: Reference) -> list[StageOutputs]:
    whole, count = parts.trees[reference], bundle.round.num_microbatches
    metas = bundle.microbatches
    slices = [StageOutputs(microbatches.cut(whole, count, meta.number)) for meta in metas]
    if reference != TARGET or not parts.weights:
        return slices
    weights = [parts.weights[meta.number] for meta in metas]
    return [one._replace(weight=weight) for one, weight in zip(slices, weights, strict=True)]


def _serve(handoff: Handoff, parent_pid: int, config: Config, stage: str) -> NoReturn:
    """Answer the worker, whose process id is `parent_pid`, until it is gone; then exit."""
    die_with_parent(parent_pid, signal.SIGKILL)
    setproctitle("rpcmp.data.batches")
    torch.set_num_threads(1)
    loading = _Loading(config, stage)
    answer = loading.build()
    while True:
        try:
            _send(handoff, answer, stage)
            request = handoff.receive()
            is_order = len(request) == 1
            answer = loading.order(*request) if is_order else loading.load(*request)
        except (OSError, EOFError):
            os._exit(0)


def _send(handoff: Handoff, answer: Message, stage: str) -> None:
    try:
        handoff.send(answer)
    except (OSError, EOFError):
        raise
    except Exception as error:  # a tensor cannot be handed over, and nothing was sent
        handoff.send({"error": to_wire(_stage_error(stage, error))})


def _unpacked(references: Sequence[Reference], answer: Message) -> Parts:
    """Return the parts of a mini-batch in a process's answer."""
    leaves = iter(answer["leaves"])
    trees = pickle.loads(bytes.fromhex(answer["trees"]))
    parts = pytree.map_leaves(lambda _: next(leaves), trees)
    weights = loss_weights.shares(answer["weights"])
    return Parts(dict(zip(references, parts, strict=True)), weights, answer["position"])


class _Loading:
    def __init__(self, config: Config, stage: str) -> None:
        self._config = config
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._samples: dict[str, Samples | StreamReader | PassReader] = {}
        self._weights: loss_weights.LossWeights | None = None

    def build(self) -> Message:
        section = self._config.require_data("loading samples at a stage")
        sizes: dict[str, int] = {}
        try:
            if self._config.weighing and self._config.graph().sink == self._stage:
                self._weights = loss_weights.LossWeights(self._config)
            for name, source in section.factories.items():
                dataset = batches.create_dataset(source, f"data.{name}", self._config.seed)
                made: Samples | StreamReader | PassReader
                if not batches.is_stream(dataset):
                    made = Samples(dataset, self._config.seed, Collate(section.collate))
                elif name == "train":
                    made = StreamReader(self._config)
                else:
                    made = PassReader(dataset, self._config)
                self._samples[name], sizes[name] = made, len(made)
        except Exception as error:
            return _config_error(error)
        streams = [name for name, made in self._samples.items() if not isinstance(made, Samples)]
        return {"sizes": sizes, "streams": streams}

    def order(self, epoch: int) -> Message:
        try:
            self._sampler.set_epoch(epoch)
            return {"indices": torch.tensor(self._sampler.indices(), dtype=torch.int64)}
        except Exception as error:
            return _config_error(error)

    @functools.cached_property
    def _sampler(self) -> OwnSampler:
        # Created on first use, since only one process of a job draws an order.
        section = self._config.require_data("sampling")
        train = self._samples["train"]
        dataset = train.dataset if isinstance(train, Samples) else None
        sampler = None if dataset is None else sampler_of(dataset, section, self._config.seed)
        if sampler is None:
            raise ConfigError("the job has no data.sampler")
        return sampler

    def load(
        self,
        dataset: str,
        epoch: int,
        index: int,
        samples: list[int],
        num_microbatches: int,
        position: str,
    ) -> Message:
        """Load a mini-batch, which will be cut into `num_microbatches`.

        Args:
            position: where a stream has to go on, if not after the mini-batch before.
        """
        weights: list[float] = []
        try:
            source = self._samples[dataset]
            if isinstance(source, StreamReader) and position:
                source.seek(position)
            loaded = source.load((epoch, index, samples))
            if self._weights is not None and loaded is not None:
                where = f"data.{dataset}, mini-batch {index + 1} of epoch {epoch}"
                targets = microbatches.split(loaded.targets, num_microbatches)
                weights = self._weights.of(targets, where, dataset == "train")
            parts = [_select(loaded, reference) for reference in self._references]
            trees = pickle.dumps(pytree.map_leaves(lambda _: None, parts)).hex()
        except RpcmpError as error:
            return {"error": to_wire(error)}
        except BaseException as error:  # also sys.exit() in the user's code
            return {"error": to_wire(_stage_error(self._stage, error))}
        return {
            "trees": trees,
            "leaves": list(pytree.leaves(parts)),
            "weights": weights,
            "position": "" if isinstance(source, Samples) else source.position,
        }


def _config_error(error: Exception) -> Message:
    text = str(error) if isinstance(error, RpcmpError) else explain_error(error)
    return {"error": to_wire(ConfigError(f"on {platform.node()}: {text}"))}


def _stage_error(stage: str, error: BaseException) -> StageError:
    text = "".join(traceback.format_exception(error))
    return StageError(stage, "data", one_line(error), text)


def _select(loaded: Loaded | None, reference: Reference) -> Any:
    """Return the part of a mini-batch that a stage reads; nothing of one that was read before."""
    if loaded is None:
        return ()
    batch = dict(zip(SOURCES, loaded, strict=True))
    try:
        return pytree.select(batch[reference.producer], reference.path)
    except LookupError as error:
        raise ConfigError(f"a stage reads {str(reference)!r}: {error}") from error
