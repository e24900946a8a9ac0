"""The driver's side of rounds of micro-batches: start them, wait for them, abort them.

A round cuts a mini-batch into micro-batches, asks the last stage for them and joins the answers.
The backward of micro-batch 0 runs while micro-batch 3 still goes forward: the stages' schedules
decide which stage does what and when, not the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.config.topology import member_name
from rpcmp.data import loss_weights
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.batches import Loaded
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import JobError, RpcmpError, StageError, from_wire
from rpcmp.pipelining import cost_model, microbatches
from rpcmp.rpc import transport
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    Bundle,
    LossWeight,
    Mode,
    RoundHeader,
    Trained,
)
from rpcmp.rpc.transport import Raised
from rpcmp.worker.requests import DRIVER_PORT
from rpcmp.worker.stage import Stage

Batch: TypeAlias = Loaded | BatchIndices
"""A mini-batch: its tensors, or the indices of samples that stages load."""


SlicesAndWeights: TypeAlias = tuple[list[Any], list[Any] | None, list[LossWeight]]
"""See `BatchServer.load`."""


@dataclass(frozen=True)
class RoundHandle:
    """A round that has been started; `answer` waits for its micro-batches' results, in order."""

    header: RoundHeader
    answer: Callable[[], list[Any]]

    @property
    def number(self) -> int:
        return self.header.number


class Rounds:
    """Starts all rounds of a job, one after the other; those that train may overlap.

    Args:
        source: serves the mini-batches that the driver has loaded.

    Attributes:
        smallest: samples that a micro-batch needs to be trained with.
    """

    def __init__(self, config: Config, source: BatchServer, workers: WorkerRefs) -> None:
        self._config = config
        self._source = source
        self._workers = workers
        self._sink = config.graph().sink
        self._assignments = {stage: config.turns_of(stage) for stage in config.stage_names}
        self._last = 0
        self.smallest = (config.data and config.data.min_microbatch) or 1
        self._last_trained: dict[int, int] = {}
        self._step = 0
        self._accumulated = 0
        self._threads = ThreadPoolExecutor(cost_model.in_flight(config), "rpcmp-bundle")

    def count(self, num_samples: int, is_training: bool) -> int:
        """Return the number of micro-batches of a mini-batch."""
        smallest = self.smallest if is_training else 1
        return len(microbatches.sizes(num_samples, self._config.num_microbatches, smallest))

    def reschedule(self, config: Config) -> None:
        """Switch to the schedule options of `config`, between two rounds."""
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(cost_model.in_flight(config), "rpcmp-bundle")
        self._config = config

    def train(
        self, batch: Batch, step: int, after: AfterRound, version: int = 0, save: bool = False
    ) -> RoundHandle:
        """Start forward and backward of a mini-batch; see `StageGroup.start_step`."""
        if step != self._step:
            self._step, self._accumulated = step, 0
        header = self._new_round(Mode.TRAIN, step, batch)  # stage.py [2]
        header = header._replace(
            accumulated=self._accumulated, after=after, version=version, save=save
        )
        # The same step may come again once it is done: a state from before it may be loaded.
        accumulates = after is AfterRound.NOTHING
        self._accumulated = self._accumulated + header.num_microbatches if accumulates else 0
        idle = self._notify_idle(header)
        by_replica: dict[int, list[Bundle]] = {}
        for bundle in header.bundles():
            by_replica.setdefault(self._sink_replica(bundle), []).append(bundle)
        calls = [
            (self._sink_name(replica), self._call_train(replica, bundles))
            for replica, bundles in by_replica.items()
        ]

        def answer() -> list[Trained]:
            answers = transport.results(calls)  # stage.py [15]
            transport.results(idle)
            remaining = dict(zip(by_replica, map(iter, answers), strict=True))
            return [
                next(remaining[self._sink_replica(bundle)])
                for bundle in header.bundles()
                for _ in header.indices_in([bundle.number])
            ]

        return RoundHandle(header, answer)

    def forward(self, mode: Mode, batch: Batch, step: int, count: int | None = None) -> RoundHandle:
        """Start a round without backwards, several bundles at once.

        If one fails, its error is the answer, without waiting for the others.

        Args:
            mode: EVALUATE or PREDICT.
            step: the optimizer step that the round follows.
            count: the number of micro-batches; None: the config's.
        """
        header = self._new_round(mode, step, batch, count)
        idle = self._notify_idle(header)
        answers = [self._threads.submit(self._forward, bundle) for bundle in header.bundles()]

        def answer() -> list[Any]:
            transport.results(idle)
            done, waiting = wait(answers, return_when=FIRST_EXCEPTION)
            for future in waiting:  # those that run already are freed by the abort
                future.cancel()
            ended = [future for future in answers if not waiting or future in done]
            return [value for future in ended for value in future.result()]

        return RoundHandle(header, answer)

    def finish(self, started: RoundHandle) -> list[Any]:
        """Return the result of each micro-batch, in order."""
        try:
            return started.answer()
        except RpcmpError as error:
            raise self.abort(error, started.number) from error
        finally:
            self._source.clear(started.number)

    def abort(self, error: RpcmpError, first: int | None = None) -> RpcmpError:
        """Unblock all calls of this round and later ones; return the root cause of `error`.

        Args:
            first: the round's number; None: the last one.
        """
        first = self._last if first is None else first
        futures = {
            worker.label: self._workers.rpc_async(worker, Stage.abort, first, self._last)
            for worker in self._workers
        }
        own: list[RpcmpError] = []
        lost: list[RpcmpError] = []
        for label, future in futures.items():
            answer = transport.outcome(future, label)
            if isinstance(answer, Raised):
                lost.append(from_wire(answer.error))
            else:
                own += [from_wire(raised.error) for raised in answer]
        return _root_cause([*own, *lost], error)

    def discard(self) -> None:
        self._accumulated = 0

    def close(self) -> None:
        self._threads.shutdown()

    def _new_round(
        self, mode: Mode, step: int, batch: Batch, count: int | None = None
    ) -> RoundHeader:
        """Number a new round, and serve its slices to the stages."""
        count = count or self.count(batch.num_samples, mode is Mode.TRAIN)
        # A mini-batch that cannot be cut or weighed takes no number, which stages would miss.
        sliced = self._cut(batch, mode, step, count) if isinstance(batch, Loaded) else None
        self._last += 1
        if sliced is not None:
            self._source.load(self._last, *sliced)
        return RoundHeader(
            number=self._last,
            step=step,
            mode=mode,
            num_samples=batch.num_samples,
            num_microbatches=count,
            per_message=self._config.options.microbatches_per_message,
            in_turns=self._config.is_replicated,
            batch_id=batch.batch_id if isinstance(batch, BatchIndices) else 0,
        )

    def _cut(self, batch: Loaded, mode: Mode, step: int, count: int) -> SlicesAndWeights:
        """Return a mini-batch's slices of inputs and targets, and what the targets weigh."""
        inputs = microbatches.split(batch.inputs, count)
        if batch.targets is None:
            return inputs, None, []
        targets = microbatches.split(batch.targets, count)
        is_training = mode is Mode.TRAIN
        where = f"step {step}" if is_training else f"evaluation after step {step}"
        weights = self._weights.of(targets, where, is_training)
        return inputs, targets, loss_weights.shares(weights)

    @functools.cached_property
    def _weights(self) -> loss_weights.LossWeights:
        # Not before it is needed: where stages load the samples, only they may have the function.
        return loss_weights.LossWeights(self._config)

    def _notify_idle(self, header: RoundHeader) -> list[tuple[str, Future[Any]]]:
        """Start the round at replicas that have no bundle in it; they count rounds as well."""
        return [
            (worker.label, self._workers.call(worker.name, Stage.stand_by, header))
            for worker in self._workers
            if not self._assignments[worker.stage].numbers(worker.replica, header.num_bundles)
        ]

    def _call_train(self, replica: int, bundles: list[Bundle]) -> Future[Any]:
        before = self._last_trained.get(replica, 0)
        self._last_trained[replica] = bundles[0].round.number
        return self._workers.call(self._sink_name(replica), Stage.train, bundles, before)

    def _forward(self, bundle: Bundle) -> list[Any]:
        sink = self._sink_name(self._sink_replica(bundle))
        future = self._workers.call(sink, Stage.forward, bundle, DRIVER_PORT)
        answer: list[Any] = transport.result(future, sink)
        return answer

    def _sink_replica(self, bundle: Bundle) -> int:
        return self._assignments[self._sink].owner(bundle.number)

    def _sink_name(self, replica: int) -> str:
        return member_name(self._sink, replica)


def _root_cause(failures: list[RpcmpError], first: RpcmpError) -> RpcmpError:
    """Return the error to report: the earliest micro-batch's StageError, if there is one."""
    own = [error for error in failures if isinstance(error, StageError)]
    if own:  # a failed sum usually has another cause
        return min(own, key=lambda error: (error.phase == "sum", error.microbatch or 0))
    if type(first) is not JobError:
        return first
    return failures[0] if failures else first
