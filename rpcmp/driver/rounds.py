"""Rounds of micro-batches, as the driver begins them, waits for them and ends them.

A round cuts a mini-batch into micro-batches, asks the last stage for them and puts the answers
together. The backward of micro-batch 0 runs while micro-batch 3 still goes forward: which stage
does what, and when, is the business of the stages' schedules and not of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.config.topology import member_name
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.batches import Loaded
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import JobError, RpcmpError, StageError, from_wire
from rpcmp.pipelining import inflight, microbatch
from rpcmp.rpc import transport
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    Bundle,
    MicrobatchMeta,
    Mode,
    Trained,
    bundles,
)
from rpcmp.rpc.transport import Raised
from rpcmp.worker.stage import DRIVER_PORT, Stage

Batch: TypeAlias = Loaded | BatchIndices
"""A mini-batch: its tensors, or which samples the stages have been told to load."""


@dataclass(frozen=True)
class RoundHandle:
    """Micro-batches under way.

    Attributes:
        works: its micro-batches.
        answer: waits for what comes of each of them, in order.
    """

    works: list[MicrobatchMeta]
    answer: Callable[[], list[Any]]

    @property
    def number(self) -> int:
        """Counts rounds, from 1."""
        return self.works[0].round


class RoundScheduler:
    """All rounds of a job, one after the other; those that train may overlap.

    Args:
        config: the job.
        source: what this process serves to the stages.
        workers: of all stages.

    Attributes:
        smallest: samples that a micro-batch needs that is trained with.
    """

    def __init__(self, config: Config, source: BatchServer, workers: WorkerRefs) -> None:
        self._config = config
        self._source = source
        self._workers = workers
        self._sink = config.graph().sink
        self._turns = {stage: config.turns_of(stage) for stage in config.stage_names}
        self._last = 0
        self.smallest = (config.data and config.data.min_microbatch) or 1
        self._conducted: dict[int, int] = {}
        self._step = 0
        self._accumulated = 0
        self._threads = ThreadPoolExecutor(inflight.in_flight(config), "rpcmp-bundle")

    def reschedule(self, config: Config) -> None:
        """Go on with the micro-batches of another setting; between two rounds.

        Args:
            config: the job with that setting.
        """
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(inflight.in_flight(config), "rpcmp-bundle")
        self._config = config

    def train(
        self, batch: Batch, step: int, end: AfterRound, version: int = 0, save: bool = False
    ) -> RoundHandle:
        """Begin forward and backward of a mini-batch; see `Group.start_step`."""
        if step != self._step:
            self._step, self._accumulated = step, 0
        works = self._works(Mode.TRAIN, step, batch, end, version, save)
        # The same step may come again once it is done: a state from before it may be loaded.
        self._accumulated = self._accumulated + len(works) if end is AfterRound.NOTHING else 0
        parts, standing_by = self._begin(works)
        asked = {owner: self._conduct(owner, part) for owner, part in parts.items()}

        def answer() -> list[Trained]:
            found = transport.results([(self._sink_name(r), asked[r]) for r in asked])
            transport.results(standing_by)
            by_owner = dict(zip(asked, map(iter, found), strict=True))
            turns = self._turns[self._sink]
            return [
                next(by_owner[turns.owner(bundle.number)])
                for bundle in self._bundles(works)
                for _ in bundle.works
            ]

        return RoundHandle(works, answer)

    def forward(self, mode: Mode, batch: Batch, step: int) -> RoundHandle:
        """Begin a round without backwards, a few bundles at once.

        Where one fails, the answer is its error, without waiting for the others.

        Args:
            mode: what the last stage makes of its outputs.
            batch: see `Group.start_step`.
            step: the optimizer step that this follows.
        """
        works = self._works(mode, step, batch)
        _, standing_by = self._begin(works)
        answers = [self._threads.submit(self._ask, bundle) for bundle in self._bundles(works)]

        def answer() -> list[Any]:
            transport.results(standing_by)
            done, waiting = wait(answers, return_when=FIRST_EXCEPTION)
            for future in waiting:  # those that run are freed by the abort
                future.cancel()
            ended = [future for future in answers if not waiting or future in done]
            return [found for future in ended for found in future.result()]

        return RoundHandle(works, answer)

    def finish(self, started: RoundHandle) -> list[Any]:
        """What came of each micro-batch, in order.

        Raises:
            RpcmpError: what failed first, at whichever stage; all of them are free again.
        """
        try:
            return started.answer()
        except RpcmpError as error:
            raise self.abort(error, started.number) from error
        finally:
            self._source.clear(started.number)

    def abort(self, error: RpcmpError, first: int | None = None) -> RpcmpError:
        """Free whoever waits in a round or in a later one; returns the cause of `error`.

        Args:
            error: why.
            first: the round's number; None: the last one.
        """
        first = self._last if first is None else first
        futures = {
            worker.label: self._workers.on(worker, Stage.abort, first, self._last)
            for worker in self._workers
        }
        answers = [transport.outcome(future, name) for name, future in futures.items()]
        lost = [from_wire(answer.error) for answer in answers if isinstance(answer, Raised)]
        noted = [answer for answer in answers if not isinstance(answer, Raised)]
        own = [from_wire(raised.error) for found in noted for raised in found]
        return _root_cause([*own, *lost], error)

    def discard(self) -> None:
        """What has been accumulated for this step does not count."""
        self._accumulated = 0

    def close(self) -> None:
        """Nothing is asked any more."""
        self._threads.shutdown()

    def _works(
        self,
        mode: Mode,
        step: int,
        batch: Batch,
        end: AfterRound = AfterRound.NOTHING,
        version: int = 0,
        save: bool = False,
    ) -> list[MicrobatchMeta]:
        """The micro-batches of a new round, whose slices the stages can ask for from now on."""
        samples = batch.num_samples
        smallest = self.smallest if mode is Mode.TRAIN else 1
        sizes = microbatch.sizes(samples, self._config.num_microbatches, smallest)
        count = len(sizes)
        self._last += 1
        if isinstance(batch, Loaded):
            targets = None if batch.targets is None else microbatch.split(batch.targets, count)
            self._source.load(self._last, microbatch.split(batch.inputs, count), targets)
        return [
            MicrobatchMeta(
                round=self._last,
                step=step,
                microbatch=index,
                num_microbatches=len(sizes),
                accumulated=self._accumulated if mode is Mode.TRAIN else 0,
                num_samples=size,
                total_samples=samples,
                mode=mode,
                end=end,
                version=version,
                save=save,
                drawn=batch.number if isinstance(batch, BatchIndices) else 0,
            )
            for index, size in enumerate(sizes)
        ]

    def _bundles(self, works: list[MicrobatchMeta]) -> list[Bundle]:
        return bundles(works, self._config.microbatches_per_message)

    def _begin(
        self, works: list[MicrobatchMeta]
    ) -> tuple[dict[int, list[Bundle]], list[tuple[str, Future[Any]]]]:
        """The bundles of a round, by the replica of the sink that they end at.

        Replicas for which there are no bundles are told of the round, which they count as well:
        with them, their answers.
        """
        bundles = self._bundles(works)
        standing_by = [
            (worker.label, self._workers.call(worker.name, Stage.stand_by, bundles[0]))
            for worker in self._workers
            if not self._turns[worker.stage].numbers(worker.replica, len(bundles))
        ]
        turns = self._turns[self._sink]
        parts: dict[int, list[Bundle]] = {}
        for bundle in bundles:
            parts.setdefault(turns.owner(bundle.number), []).append(bundle)
        return parts, standing_by

    def _conduct(self, replica: int, bundles: list[Bundle]) -> Future[Any]:
        """Have a replica of the sink train with its part of a round."""
        after = self._conducted.get(replica, 0)
        self._conducted[replica] = bundles[0].round
        return self._workers.call(self._sink_name(replica), Stage.train, bundles, after)

    def _ask(self, bundle: Bundle) -> list[Any]:
        sink = self._sink_name(self._turns[self._sink].owner(bundle.number))
        future = self._workers.call(sink, Stage.forward, bundle, DRIVER_PORT)
        answer: list[Any] = transport.result(future, sink)
        return answer

    def _sink_name(self, replica: int) -> str:
        return member_name(self._sink, replica)


def _root_cause(failures: list[RpcmpError], first: RpcmpError) -> RpcmpError:
    """Which of all errors of a round to show: the user's own, the earliest micro-batch's first."""
    own = [error for error in failures if isinstance(error, StageError)]
    if own:  # a sum fails because of something else, where that is known
        return min(own, key=lambda error: (error.phase == "sum", error.microbatch or 0))
    if type(first) is not JobError:
        return first
    return failures[0] if failures else first
