"""The stages as the driver sees them: one call for a train step, an evaluation or a prediction.

A round cuts a mini-batch into micro-batches, asks the last stage for them and puts the answers
together. The backward of micro-batch 0 runs while micro-batch 3 still goes forward: which stage
does what, and when, is the business of the stages' schedules and not of the driver.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.futures import Future

from rpcmp import digest, inflight, microbatch, transport, tree
from rpcmp.config import Config
from rpcmp.data import Loaded
from rpcmp.driver import replicas
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.metrics import Metrics
from rpcmp.driver.optimizer import DistributedOptimizer
from rpcmp.driver.scaler import LossScaler
from rpcmp.driver.workers import Workers
from rpcmp.errors import (
    ConfigError,
    JobError,
    RpcmpError,
    StageError,
    from_wire,
)
from rpcmp.members import DRIVER, Member, member
from rpcmp.source import Source
from rpcmp.trace.spans import Span
from rpcmp.transport import Raised
from rpcmp.work import (
    Bundle,
    Drawn,
    End,
    Evaluated,
    Holding,
    Mode,
    Outputs,
    StepReport,
    Trained,
    Work,
    bundles,
)
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.stage import DRIVER_PORT, Stage

Batch: TypeAlias = Loaded | Drawn
"""A mini-batch: its tensors, or which samples the stages have been told to load."""


@dataclass(frozen=True)
class Round:
    """Micro-batches under way.

    Attributes:
        number: counts rounds, from 1.
        step: the optimizer step that it is or follows.
        answer: waits for what comes of each micro-batch, in order.
    """

    number: int
    step: int
    answer: Callable[[], list[Any]]


class Group:
    """All stages of a job, after every process has joined.

    Train steps may overlap; everything else waits until no round is under way.

    Args:
        config: the job.
        source: what this process serves to the stages.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self._source = source
        self._sink = config.graph().sink
        self._workers = Workers.join(config.workers)
        graph = config.graph()
        self._turns = {stage: config.turns_of(stage) for stage in config.stage_names}
        self._readers = [worker for worker in config.workers if graph.parts(worker.stage)]
        self.optimizer = DistributedOptimizer(
            self._workers.parts(_optimizer_of),
            self._sum_gradients,
            None if config.loss_scaling is None else LossScaler(config.loss_scaling),
        )
        self._round = 0
        self._conducted: dict[int, int] = {}
        self._unsummed = 0
        self._step = 0
        self._accumulated = 0
        self._threads = ThreadPoolExecutor(inflight.in_flight(config), "rpcmp-bundle")
        self._unite()

    def reschedule(self, config: Config) -> None:
        """Go on under another setting, one that the plan foresaw; between two rounds.

        Args:
            config: the job with that setting.
        """
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(inflight.in_flight(config), "rpcmp-bundle")
        self._everywhere(Stage.reschedule, config.schedule, inflight.limits(config))
        self._config = config

    def start_step(
        self,
        batch: Batch,
        step: int,
        end: End,
        version: int = 0,
        save: bool = False,
    ) -> Round:
        """Begin a train step; `finish_step` waits for it.

        Up to STEPS_AHEAD may be under way; every stage works on them strictly in order.

        Args:
            batch: one that the stages load they must have heard of by `announce`.
            step: the optimizer step that this is for, counted from 1; seeds dropout. Called again
                for the same step, gradients add up and dropout goes on drawing.
            end: what the stages do by themselves afterwards.
            version: the number under which they keep what they are then; 0: they do not.
            save: whether that goes to their disks.
        """
        if step != self._step:
            self._step, self._accumulated = step, 0
        works = self._works(Mode.TRAIN, step, batch, end, version, save)
        self._accumulated += len(works)
        parts, standing_by = self._begin(works)
        asked = {owner: self._conduct(owner, part) for owner, part in parts.items()}
        self._unsummed = self._round if end is End.NOTHING else 0

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

        return Round(self._round, step, answer)

    def finish_step(self, started: Round) -> Trained:
        """Wait for a train step, the earliest under way.

        Raises:
            StageError: the user's code raised at a stage.
            NonFiniteLossError: the loss is NaN or infinite, and not scaled.
        """
        try:
            trained: list[Trained] = self._finish(started)
        except JobError:
            self._accumulated = 0
            self._let_go_of_gradients()
            raise
        reports = {name: report for part in trained for name, report in part.reports.items()}
        return Trained(math.fsum(part.loss for part in trained), reports)

    def forward_backward(self, batch: Batch, step: int) -> float:
        """Accumulate the gradients of a mini-batch and return its loss; see `start_step`."""
        return self.finish_step(self.start_step(batch, step, End.NOTHING)).loss

    def end_step(self, started: Round, loss: float) -> dict[str, StepReport]:
        """Let all stages step that hold a step, after its `finish_step`; what they report.

        Args:
            started: which one.
            loss: the step's, for schedulers that watch it.

        Raises:
            StageError: an optimizer raised.
        """
        watched = loss if self._config.steps_scheduler("step") else None
        try:
            self._sum_after(started.number)
            return self.optimizer.finish(self._config.max_grad_norm, watched)
        except RpcmpError as error:  # no stage may be left that holds the round
            cause = _root_cause(self._abort(started.number), error)
            self._let_go_of_gradients()
            raise cause from error

    def settle(self) -> dict[str, StepReport]:
        """Wait until all stages have done all that they were asked for; what they report.

        Raises:
            StageError: the last step failed in a weight gradient or an optimizer.
        """
        found = self._everywhere(Stage.settle)
        return {name: report for name, report in found.items() if report is not None}

    def keep(self, version: int) -> None:
        """Have all stages keep what they are, now that they have done all, as `version`.

        Raises:
            StageError: what a stage is cannot be stored.
        """
        self._everywhere(Stage.keep, version)

    def save(self, step: int) -> None:
        """Have all stages save what they were after `step`, the last one.

        Raises:
            StageError: what a stage is cannot be stored.
        """
        self._everywhere(Stage.save, step)

    def evaluate(self, batch: Batch, step: int, own: Metrics | None = None) -> Evaluation:
        """Loss and means of a mini-batch; parameters and gradients stay as they are.

        Args:
            batch: see `start_step`.
            step: the optimizer step that this follows.
            own: the driver's metrics, which take in every micro-batch, in order.
        """
        works = self._works(Mode.EVALUATE, step, batch)
        found: list[Evaluated] = self._finish(self._ask_all(works))
        if own is not None and own.names:
            parts = (
                microbatch.split(batch.targets, self._config.num_microbatches)
                if isinstance(batch, Loaded)
                else [answer.targets for answer in found]
            )
            for answer, part in zip(found, parts, strict=True):
                own.update(answer.outputs, part)
        return mean(
            Evaluation(work.num_samples, answer.loss, answer.metrics)
            for work, answer in zip(works, found, strict=True)
        )

    def predict(self, inputs: Any, step: int) -> Any:
        """The last stage's outputs for `inputs`, joined again along the first dimension."""
        works = self._works(Mode.PREDICT, step, Loaded(inputs))
        found: list[Outputs] = self._finish(self._ask_all(works))
        return _concatenate([answer.value for answer in found])

    def parameters_sha256(self) -> str:
        """The hash of `rpcmp.digest` over the unsplit model.

        Raises:
            MismatchError: the replicas of a stage are not the same model.
        """
        if self._config.is_replicated:
            replicas.require_equal(self._workers)
        return digest.combine(self._merge(Stage.digests))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the unsplit model, on the host."""
        return self._merge(Stage.state_dict)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the parameters and buffers of the unsplit model; each stage gets its own.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        state = {n: value for n, value in state.items() if n not in self._config.tied_to}
        names: dict[str, list[str]] = self._workers.on_firsts(Stage.state_names)
        known = {name for of_stage in names.values() for name in of_stage}
        if known != set(state):
            missing, unknown = sorted(known - set(state)), sorted(set(state) - known)
            raise ConfigError(f"the state misses {missing} and has unknown {unknown}")
        futures = [
            (
                w.label,
                self._workers.on(w, Stage.load_state_dict, {n: state[n] for n in names[w.stage]}),
            )
            for w in self._workers
        ]
        transport.results(futures)
        self._unite()

    def holdings(self) -> dict[str, Holding]:
        """What the stages have built to load samples from, by name; of those that do so."""
        asked = [(each.label, self._workers.on(each, Stage.holding)) for each in self._readers]
        pairs = zip(self._readers, transport.results(asked), strict=True)
        return {each.label: holding for each, holding in pairs if holding is not None}

    def announce(self, drawn: Sequence[Drawn]) -> None:
        """Tell these stages which mini-batches they will be asked for, so that they load them."""
        for worker in self._readers:
            self._workers.on(worker, Stage.expect, list(drawn))

    def hosts(self) -> dict[str, dict[str, str]]:
        """What decides the bits of each stage's host; see rpcmp.host."""
        return self._everywhere(Stage.host)

    def trace(self, on: bool) -> dict[str, str]:
        """Let all stages record every action, or stop it; returns the names of their hosts."""
        return self._everywhere(Stage.trace, on)

    def take_spans(self) -> dict[str, list[Span]]:
        """What each stage has recorded since this was last asked."""
        return self._everywhere(Stage.take_spans)

    def follow(self) -> dict[str, str]:
        """Let all stages keep what they did in their last steps; the names of their hosts."""
        return self._everywhere(Stage.follow)

    def ask_recent(self, step: int, count: int) -> Callable[[], dict[str, list[Span]]]:
        """Ask what each stage did in the last `count` steps up to `step`; what is returned waits
        for the answers."""
        asked = [(w.label, self._workers.on(w, Stage.recent, step, count)) for w in self._workers]

        def answers() -> dict[str, list[Span]]:
            found = transport.results(asked)
            return {label: spans for (label, _), spans in zip(asked, found, strict=True)}

        return answers

    def clock(self, worker: Member) -> int:
        """A worker's `time.perf_counter_ns`, now."""
        now: int = transport.result(self._workers.on(worker, Stage.clock), worker.label)
        return now

    def memory(self) -> dict[str, dict[str, int]]:
        """Each stage's bytes: "idle", when it had been built, and "peak"."""
        return self._everywhere(Stage.memory)

    def live_state(self) -> dict[str, dict[str, int]]:
        """For each stage and the driver, counts of what a step must not leave behind."""
        return {**self._everywhere(Stage.live_state), DRIVER: transport.live_state()}

    def close(self) -> None:
        """Tell all workers to leave the group, and let go of what lives there."""
        self._threads.shutdown()
        self._everywhere(Stage.finish)
        self.optimizer.release()
        self._workers.release()

    def _works(
        self,
        mode: Mode,
        step: int,
        batch: Batch,
        end: End = End.NOTHING,
        version: int = 0,
        save: bool = False,
    ) -> list[Work]:
        """The micro-batches of a new round, whose slices the stages can ask for from now on."""
        count = self._config.num_microbatches
        samples = batch.num_samples
        sizes = microbatch.sizes(samples, count)
        self._round += 1
        if isinstance(batch, Loaded):
            targets = None if batch.targets is None else microbatch.split(batch.targets, count)
            self._source.load(self._round, microbatch.split(batch.inputs, count), targets)
        return [
            Work(
                round=self._round,
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
                drawn=batch.number if isinstance(batch, Drawn) else 0,
            )
            for index, size in enumerate(sizes)
        ]

    def _begin(
        self, works: list[Work]
    ) -> tuple[dict[int, list[Bundle]], list[tuple[str, Future[Any]]]]:
        """The bundles of a round, by the replica of the sink that they end at.

        Replicas for which there are no bundles are told of the round, which they count as well:
        with them, their answers.
        """
        bundles = self._bundles(works)
        standing_by = [
            (worker.label, transport.call(worker.name, Stage.stand_by, bundles[0]))
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
        return transport.call(self._sink_name(replica), Stage.train, bundles, after)

    def _sink_name(self, replica: int) -> str:
        return member(self._sink, replica)

    def _let_go_of_gradients(self) -> None:
        self._unsummed = 0
        with contextlib.suppress(RpcmpError):  # a worker that is gone has no gradients
            self.optimizer.zero_grad()

    def _unite(self) -> None:
        """Make equal what has to be, where several workers have the same parameters."""
        if self._config.sums_gradients:
            replicas.unite(self._workers, self._config.tied)

    def _sum_gradients(self) -> None:
        """Have replicas sum what has added up, where they have not done so yet."""
        if self._unsummed:
            self._sum_after(self._unsummed)
            self._unsummed = 0

    def _sum_after(self, round_number: int) -> None:
        if self._config.sums_gradients:
            self._everywhere(Stage.sum, round_number)

    def _bundles(self, works: list[Work]) -> list[Bundle]:
        return bundles(works, self._config.microbatches_per_message)

    def _ask_all(self, works: list[Work]) -> Round:
        """Begin a round without backwards, a few bundles at once; what comes of each micro-batch.

        Where one fails, the answer is its error, without waiting for the others.
        """
        _, standing_by = self._begin(works)
        answers = [self._threads.submit(self._ask, bundle) for bundle in self._bundles(works)]

        def answer() -> list[Any]:
            transport.results(standing_by)
            done, waiting = wait(answers, return_when=FIRST_EXCEPTION)
            for future in waiting:  # those that run are freed by the abort
                future.cancel()
            ended = [future for future in answers if not waiting or future in done]
            return [found for future in ended for found in future.result()]

        return Round(self._round, works[0].step, answer)

    def _finish(self, started: Round) -> list[Any]:
        """What came of each micro-batch, in order."""
        try:
            return started.answer()
        except RpcmpError as error:
            raise _root_cause(self._abort(started.number), error) from error
        finally:
            self._source.clear(started.number)

    def _abort(self, first: int) -> list[RpcmpError]:
        """Free whoever waits since round `first`; returns what failed, at whichever stage."""
        futures = {
            worker.label: self._workers.on(worker, Stage.abort, first, self._round)
            for worker in self._workers
        }
        answers = [transport.outcome(future, name) for name, future in futures.items()]
        lost = [from_wire(answer.error) for answer in answers if isinstance(answer, Raised)]
        noted = [answer for answer in answers if not isinstance(answer, Raised)]
        return [*(from_wire(raised.error) for found in noted for raised in found), *lost]

    def _ask(self, bundle: Bundle) -> list[Any]:
        sink = self._sink_name(self._turns[self._sink].owner(bundle.number))
        future = transport.call(sink, Stage.forward, bundle, DRIVER_PORT)
        answer: list[Any] = transport.result(future, sink)
        return answer

    def _merge(self, method: Callable[..., Any]) -> dict[str, Any]:
        parts = self._workers.on_firsts(method).values()
        return {name: value for part in parts for name, value in part.items()}

    def _everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return self._workers.everywhere(method, *args)


def _optimizer_of(stage: Stage) -> StageOptimizer:
    return stage.optimizer


def _root_cause(failures: list[RpcmpError], first: RpcmpError) -> RpcmpError:
    """Which of all errors of a round to show: the user's own, the earliest micro-batch's first."""
    own = [error for error in failures if isinstance(error, StageError)]
    if own:  # a sum fails because of something else, where that is known
        return min(own, key=lambda error: (error.phase == "sum", error.microbatch or 0))
    if type(first) is not JobError:
        return first
    return failures[0] if failures else first


def _concatenate(parts: list[Any]) -> Any:
    """Trees of equal shape as one, tensors joined along the first dimension."""
    columns = zip(*(tree.leaves(part) for part in parts), strict=True)

    def join(leaf: Any) -> Any:
        column = next(columns)
        return torch.cat(column) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return tree.map_leaves(join, parts[0])
