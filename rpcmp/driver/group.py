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

from rpcmp import digest, inflight, microbatch, transport, tree
from rpcmp.config import Config
from rpcmp.data import Loaded
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.metrics import Metrics
from rpcmp.driver.optimizer import DistributedOptimizer
from rpcmp.driver.scaler import LossScaler
from rpcmp.errors import (
    ConfigError,
    JobError,
    RpcmpError,
    StageError,
    from_wire,
)
from rpcmp.members import DRIVER, member
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
        self._sink = member(config.graph().sink)
        self._stage_rrefs = {
            name: transport.remote_service(member(name)) for name in config.stage_names
        }
        graph = config.graph()
        self._readers = {
            name: rref for name, rref in self._stage_rrefs.items() if graph.parts(name)
        }
        self.optimizer = DistributedOptimizer(
            {
                name: transport.remote_part(rref, _optimizer_of)
                for name, rref in self._stage_rrefs.items()
            },
            None if config.loss_scaling is None else LossScaler(config.loss_scaling),
        )
        self._round = 0
        self._trained = 0
        self._step = 0
        self._accumulated = 0
        self._threads = ThreadPoolExecutor(inflight.in_flight(config), "rpcmp-bundle")

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
        future = transport.call(self._sink, Stage.train, self._bundles(works), self._trained)
        self._trained = self._round
        return Round(self._round, step, lambda: transport.result(future, self._sink))

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
            with contextlib.suppress(RpcmpError):  # a worker that is gone has no gradients
                self.optimizer.zero_grad()
            raise
        return Trained(math.fsum(part.loss for part in trained), trained[0].reports)

    def forward_backward(self, batch: Batch, step: int) -> float:
        """Accumulate the gradients of a mini-batch and return its loss; see `start_step`."""
        return self.finish_step(self.start_step(batch, step, End.NOTHING)).loss

    def end_step(self, loss: float) -> dict[str, StepReport]:
        """Let all stages step that hold a step, after its `finish_step`; what they report.

        Args:
            loss: the step's, for schedulers that watch it.

        Raises:
            StageError: an optimizer raised.
        """
        watched = loss if self._config.steps_scheduler("step") else None
        return self.optimizer.finish(self._config.max_grad_norm, watched)

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
        """The hash of `rpcmp.digest` over the unsplit model."""
        return digest.combine(self._merge(Stage.digests))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the unsplit model, on the host."""
        return self._merge(Stage.state_dict)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the parameters and buffers of the unsplit model; each stage gets its own.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        names: dict[str, list[str]] = self._everywhere(Stage.state_names)
        known = {name for of_stage in names.values() for name in of_stage}
        if known != set(state):
            missing, unknown = sorted(known - set(state)), sorted(set(state) - known)
            raise ConfigError(f"the state misses {missing} and has unknown {unknown}")
        futures = {
            stage: transport.call_rref(
                self._stage_rrefs[stage], Stage.load_state_dict, {n: state[n] for n in of_stage}
            )
            for stage, of_stage in names.items()
        }
        for stage, future in futures.items():
            transport.result(future, stage)

    def holdings(self) -> dict[str, Holding]:
        """What the stages have built to load samples from, by name; of those that do so."""
        found = transport.call_each(self._readers, Stage.holding)
        return {name: holding for name, holding in found.items() if holding is not None}

    def announce(self, drawn: Sequence[Drawn]) -> None:
        """Tell these stages which mini-batches they will be asked for, so that they load them."""
        for rref in self._readers.values():
            transport.call_rref(rref, Stage.expect, list(drawn))

    def hosts(self) -> dict[str, dict[str, str]]:
        """What decides the bits of each stage's host; see rpcmp.host."""
        return self._everywhere(Stage.host)

    def trace(self, on: bool) -> dict[str, str]:
        """Let all stages record every action, or stop it; returns the names of their hosts."""
        return self._everywhere(Stage.trace, on)

    def take_spans(self) -> dict[str, list[Span]]:
        """What each stage has recorded since this was last asked."""
        return self._everywhere(Stage.take_spans)

    def clock(self, stage: str) -> int:
        """A stage's `time.perf_counter_ns`, now."""
        answer = transport.call_rref(self._stage_rrefs[stage], Stage.clock)
        now: int = transport.result(answer, stage)
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
        self._stage_rrefs.clear()
        self._readers.clear()

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

    def _bundles(self, works: list[Work]) -> list[Bundle]:
        return bundles(works, self._config.microbatches_per_message)

    def _ask_all(self, works: list[Work]) -> Round:
        """Begin a round without backwards, a few bundles at once; what comes of each micro-batch.

        Where one fails, the answer is its error, without waiting for the others.
        """
        answers = [self._threads.submit(self._ask, bundle) for bundle in self._bundles(works)]

        def answer() -> list[Any]:
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
            name: transport.call_rref(rref, Stage.abort, first, self._round)
            for name, rref in self._stage_rrefs.items()
        }
        answers = [transport.outcome(future, name) for name, future in futures.items()]
        lost = [from_wire(answer.error) for answer in answers if isinstance(answer, Raised)]
        noted = [answer for answer in answers if not isinstance(answer, Raised)]
        return [*(from_wire(raised.error) for found in noted for raised in found), *lost]

    def _ask(self, bundle: Bundle) -> list[Any]:
        future = transport.call(self._sink, Stage.forward, bundle, DRIVER_PORT)
        answer: list[Any] = transport.result(future, self._sink)
        return answer

    def _merge(self, method: Callable[..., Any]) -> dict[str, Any]:
        parts = self._everywhere(method).values()
        return {name: value for part in parts for name, value in part.items()}

    def _everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return transport.call_each(self._stage_rrefs, method, *args)


def _optimizer_of(stage: Stage) -> StageOptimizer:
    return stage.optimizer


def _root_cause(failures: list[RpcmpError], first: RpcmpError) -> RpcmpError:
    """Which of all errors of a round to show: the user's own, the earliest micro-batch's first."""
    own = [error for error in failures if isinstance(error, StageError)]
    if own:
        return min(own, key=lambda error: error.microbatch or 0)
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
