"""A stage as the group sees it: asks its inputs, computes, answers its readers.

    conductor ──(1)──> sink ──(2)──> ... ──(2)──> first stage ──(2)──> driver: the batch's slices
              <──(5)──      <──(4)──     <──(4)──      (3)

(1) The conductor, in the sink's own process, asks the sink for one bundle of micro-batches; outside
of training the driver does. (2) Each stage, when first asked, asks all that it reads; nobody waits
in a thread. (3) When the answers are there, the compute thread runs the forward in its turn. (4)
Activations travel as responses, which distributed autograd records. (5) The conductor gets the loss
and differentiates it; gradients go the same way back, from boundary to boundary.

A failure is an answer as well: it travels down the responses, is remembered at its stage, and the
driver's `abort` frees whoever still waits.
"""

from __future__ import annotations

import functools
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import DRIVER, Port, ReplicaShare
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import RpcmpError, StageError, one_line
from rpcmp.pipelining.assignment import Assignment
from rpcmp.pipelining.devices import host_facts
from rpcmp.pipelining.schedule import InFlightLimits, policy
from rpcmp.process.activity import Activity
from rpcmp.rpc import tensors
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    Bundle,
    DatasetInfo,
    MicrobatchMeta,
    Mode,
    StepReport,
    microbatches_of,
)
from rpcmp.rpc.transport import Raised, Transport, result
from rpcmp.worker.backward import Backwards, Failures, NoneGradients
from rpcmp.worker.executor import ComputeThread, RoundState
from rpcmp.worker.forward import Execution
from rpcmp.worker.grad_sync.mailbox import Key
from rpcmp.worker.grad_sync.sync import GradientSync
from rpcmp.worker.model import Meter, StageModel
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.precision import LossScale
from rpcmp.worker.requests import ForwardRequests, Inputs
from rpcmp.worker.snapshots import StageSnapshots
from rpcmp.worker.step_runner import TrainStepRunner

DRIVER_PORT = 0
"""The sink's only port: its reader wants the loss (the conductor) or the outputs (the driver)."""

_WIRE_DTYPES = {None: None, "bfloat16": torch.bfloat16}


class Stage:
    """One stage of the model: built before the process joins the group, served to it after.

    Args:
        assignment: which stage of which job.
        peers: the group that it will be a member of.
        activity: told what it does.
        feed: what it loads itself; None: the driver has all of the batch.
        rehearses: whether to try that its optimizer can be restored.

    Raises:
        RpcmpError: the user's factories fail; see StageModel.

    Attributes:
        snapshots: taken after its steps; None: none are.
        finished: set when the worker has to leave the group.
    """

    def __init__(
        self,
        assignment: Assignment,
        peers: Transport,
        activity: Activity | None = None,
        feed: StageDataLoader | None = None,
        rehearses: bool = True,
    ) -> None:
        config, stage = assignment.config, assignment.stage_name
        self.name = assignment.member.label
        self.snapshots: StageSnapshots | None = None
        self._peers = peers
        graph = config.graph()
        ports = graph.ports(stage) or (Port(DRIVER, 0, ()),)
        self._share = ReplicaShare(assignment.stage.turns, assignment.replica)
        self.model = StageModel(assignment)
        self.finished = threading.Event()
        self._limits = assignment.limits
        self._compute = ComputeThread(policy(config.schedule), activity)
        self._feed = feed
        self._inputs = Inputs(
            graph, stage, self._share, config.turns_of, Stage.forward, peers, feed
        )
        self._failures = Failures()
        self._missing = NoneGradients(self._tell_missing)
        self._backwards = Backwards(
            self.name,
            self._compute,
            self._limits.splits,
            self._missing,
            self._failures,
        )
        scaling = assignment.config.loss_scaling
        scale = None if scaling is None else LossScale(scaling.initial)
        execution = Execution(
            self.name,
            self.model,
            self._inputs.references,
            ports,
            self._backwards,
            recompute=assignment.stage.recompute,
            wire_dtype=_WIRE_DTYPES[config.wire_dtype],
            loss_scale=scale,
        )
        self._together = GradientSync(
            assignment, self.model, peers, Stage.part, Stage.total, Stage.posted
        )
        self.optimizer = StageOptimizer(
            self.model, assignment, self._compute, self._together.stepped, scale, rehearses
        )
        self._exchange = ForwardRequests(
            self.name,
            self._inputs,
            len(ports),
            self._share,
            self._compute,
            execution,
            self._failures,
            self._begin,
            lambda: self.optimizer.report,
        )
        self._conductor = TrainStepRunner(
            lambda bundle: self.forward(bundle, DRIVER_PORT),
            assignment.conducted,
            peers,
            is_scaled=scale is not None,
        )
        self._meter = Meter(self.model.device)

    def vitals(self) -> dict[str, Any]:
        """How it is at this moment; asked by the heartbeat, which waits for nobody."""
        busy = self._compute.recorder.total
        return {
            "in_flight": self._compute.in_flight,
            "busy": {str(kind): nanoseconds / 1e9 for kind, nanoseconds in busy.items()},
        }

    # What the other processes call.

    def forward(self, bundle: Bundle, port: int) -> Future[Any]:
        """The answer for one reader: a list with one entry a micro-batch, or a Raised.

        The entries are Outputs, from the sink in an evaluation Evaluated.
        """
        return self._exchange.ask(bundle, port)

    def train(self, bundles: list[Bundle], after: int) -> Future[Any]:
        """Forward and backward of a round, asked of the sink; see TrainStepRunner."""
        return self._conductor.train(bundles, after)

    def stand_by(self, bundle: Bundle) -> None:
        """Take part in the round of a bundle of others: it has none for this replica."""
        if self._feed is not None and bundle.works[0].drawn:
            self._feed.skip(bundle)
        self._begin(bundle)

    def abort(self, first: int, last: int) -> list[Raised]:
        """Fail all that waits in the rounds from `first` to `last`; returns what failed here."""
        self._exchange.refuse(last)
        self._together.abort(first, last)
        self._compute.abort(first, last)  # before the failures are forgotten; see `_finish`
        failures = self._failures.take(first, last)
        self._exchange.forget()
        self._missing.clear()
        return failures

    def note_missing(self, work: MicrobatchMeta, port: int, which: list[int]) -> None:
        """Hear from a reader that it has no gradients for some tensors of its answer."""
        self._missing.note(work, port, which)

    def part(self, asking: int, key: int, bucket: int) -> Future[Any]:
        """What this replica has of gradients that another one sums; see BucketAllReduce."""
        return self._together.part(asking, key, bucket)

    def total(self, key: int, bucket: int) -> Future[Any]:
        """The gradients that this replica sums; see BucketAllReduce."""
        return self._together.total(key, bucket)

    def posted(self, key: Key) -> Future[Any]:
        """What another worker takes over from this one; see Board."""
        return self._together.posted(key)

    def settle(self) -> Future[Any]:
        """The StepReport of the last step, or None, once that is done.

        Raises:
            RpcmpError: that step failed here, in its weight gradients or its optimizer.
        """

        def report() -> StepReport | None:
            if self._failures.broken is not None:
                raise self._failures.broken
            return self.optimizer.report

        return self._compute.future(report)

    def sum(self, round_number: int) -> Future[Any]:
        """Have all gradients that a step needs, after a round that did not do so by itself.

        Raises:
            RpcmpError: this stage or another one has failed.
        """

        def sum_them() -> None:
            if (failed := self._failed(round_number)) is not None:
                raise failed
            self._sum(round_number)

        return self._compute.future(sum_them)

    def unite(self, follows: bool) -> Future[Any]:
        """Begin as what replica 0, and the owners of shared parameters, are; see GradientSync."""

        return self._compute.future(lambda: self._together.unite(follows))

    def signature(self) -> dict[str, str]:
        """What workers must agree on: what their tensors are, and the code."""
        return self.model.signature()

    def smallest_microbatch(self) -> Future[Any]:
        """Samples that a micro-batch needs to be trained with."""
        return self._compute.future(self.model.smallest_microbatch)

    def keep(self, version: int) -> Future[Any]:
        """Keep what this stage is now, as `version`."""
        return self._compute.future(lambda: self._guard_saving(lambda s: s.take(version)))

    def save(self, step: int) -> Future[Any]:
        """Have what this stage was right after `step`, the last one, written to its disk."""
        return self._compute.future(lambda: self._guard_saving(lambda s: s.save(step)))

    def reschedule(self, schedule: str, limits: dict[str, InFlightLimits]) -> Future[Any]:
        """Go on under another schedule; between two rounds.

        Args:
            schedule: its name.
            limits: of every stage, by name; of those that the assignment foresaw.
        """

        def switch() -> None:
            self._limits = limits[self.optimizer.stage]
            self._compute.policy = policy(schedule)
            self._backwards.splits = self._limits.splits

        return self._compute.future(switch)

    def holding(self) -> DatasetInfo | None:
        """What this stage has built to load samples from, where it does so itself."""
        return None if self._feed is None else self._feed.holding

    def order(self, epoch: int) -> Future[Any]:
        """The indices of an epoch's samples, int64, by the config's sampler; counted from 0."""
        if self._feed is None:
            raise RuntimeError("this stage loads no samples")
        return self._feed.order(epoch)

    def expect(self, drawn: Sequence[BatchIndices]) -> None:
        """Load mini-batches that this stage will be asked for, where it does so itself."""
        if self._feed is not None:
            self._feed.expect(drawn)

    def digests(self) -> Future[Any]:
        """`digest.tensor_line` of each parameter and buffer, by name."""
        state = self.model.state_dict
        return self._compute.future(
            lambda: {name: tensors.tensor_line(name, value) for name, value in state().items()}
        )

    def parameter_digests(self) -> Future[Any]:
        """The same of the parameters alone."""
        named = self.model.named_parameters
        return self._compute.future(
            lambda: {name: tensors.tensor_line(name, value) for name, value in named()}
        )

    def state_dict(self) -> Future[Any]:
        """Copies of the parameters and buffers, on the host, by name."""
        state = self.model.state_dict
        return self._compute.future(
            lambda: {name: value.detach().cpu().clone() for name, value in state().items()}
        )

    def state_names(self) -> list[str]:
        """The names of this stage's parameters and buffers in the unsplit model."""
        return list(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> Future[Any]:
        """Take over parameters and buffers by name."""
        return self._compute.future(lambda: self.model.load_state_dict(state))

    def live_state(self) -> dict[str, int]:
        """Counts of what a step must not leave behind."""
        return {**self._peers.live_state(), "pending": len(self._exchange)}

    def memory(self) -> dict[str, int]:
        """Bytes of this process's memory: when it was idle, and at its peak."""
        return self._meter.read()

    def host(self) -> dict[str, str]:
        """What decides this host's bits."""
        return host_facts(self.model.device)

    def trace(self, on: bool) -> Future[Any]:
        """Record every action from now on, or stop it; answers with the name of this host."""

        def switch() -> str:
            self._compute.recorder.traces = on
            return platform.node()

        return self._compute.future(switch)

    def take_spans(self) -> Future[Any]:
        """The actions that were recorded after those of the last answer."""
        return self._compute.future(self._compute.recorder.take_spans)

    def follow(self) -> Future[Any]:
        """Keep the actions of the last steps from now on; answers with the name of this host."""

        def switch() -> str:
            self._compute.recorder.follows = True
            return platform.node()

        return self._compute.future(switch)

    def recent(self, step: int, count: int) -> Future[Any]:
        """The actions of the last `count` steps up to `step`."""
        return self._compute.future(lambda: self._compute.recorder.recent(step, count))

    def clock(self) -> int:
        """This host's clock, that of the spans."""
        return time.perf_counter_ns()

    def its_optimizer(self) -> StageOptimizer:
        """The part of this stage that the driver's optimizer keeps a reference to."""
        return self.optimizer

    def finish(self) -> None:
        """Tell the worker to leave the group."""
        self.finished.set()

    # A round, and what the stage's parts ask of it.

    def _begin(self, bundle: Bundle) -> None:
        self._compute.begin(bundle.round, functools.partial(self._round, bundle))

    def _round(self, bundle: Bundle) -> RoundState:
        training = bundle.mode is Mode.TRAIN
        everything = InFlightLimits(bundle.num_bundles, bundle.num_bundles)
        return RoundState(
            step=bundle.step,
            bundles=self._share.numbers(bundle.num_bundles),
            limits=self._limits if training else everything,
            training=training,
            start=functools.partial(self._start, bundle),
            finish=functools.partial(self._finish, bundle.works[0]),
            is_held=bundle.end is AfterRound.HOLD,
        )

    def _start(self, bundle: Bundle) -> None:
        """The first action of a round comes."""
        if bundle.mode is Mode.TRAIN:
            own = microbatches_of(bundle, self._share.numbers(bundle.num_bundles))
            is_early = bundle.end is not AfterRound.NOTHING
            self._together.begin(bundle.round, len(own), is_early)

    def _finish(self, work: MicrobatchMeta) -> None:
        """What this stage does by itself after its last action of a round.

        No step where a backward failed: it counts as done, but the gradient lacks its part.

        Args:
            work: any of the round's.
        """
        if self._failed(work.round) is not None:
            return
        try:
            if work.end is AfterRound.STEP:
                self._sum(work.round)
                self.optimizer.step_now()
            if work.version:
                self._guard_saving(lambda s: s.take(work.version, work.save))
        except RpcmpError as error:
            self._failures.broken = error
            self._together.abort(work.round, work.round, error)  # or others wait for it for ever

    def _failed(self, round_number: int) -> RpcmpError | None:
        """Why this stage lacks a part of a round's gradient; others that wait for it hear of it."""
        failed = self._failures.first(round_number)
        if failed is not None:
            self._together.abort(round_number, round_number, failed)
        return failed

    def _sum(self, round_number: int) -> None:
        """Have the gradients of all workers with the same parameters.

        Raises:
            RpcmpError: they cannot be had.
        """
        with self._compute.activity.during("sum", self.optimizer.steps + 1):
            self._together.sum(round_number, self.optimizer.steps + 1)

    def _guard_saving(self, save: Callable[[StageSnapshots], None]) -> None:
        """Call `save`, where this stage keeps anything.

        Raises:
            StageError: what it is cannot be stored.
        """
        if self.snapshots is None:
            return
        try:
            save(self.snapshots)
        except Exception as error:
            cause = f"{one_line(error)} (with recovery.enabled = false nothing is stored)"
            raise StageError(self.name, "saving", cause, step=self.optimizer.steps) from error

    def _tell_missing(
        self, bundle: Bundle, work: MicrobatchMeta, index: int, which: list[int]
    ) -> None:
        producer = self._inputs.producer(index, bundle)
        port = self._inputs.ports[index]
        told = self._peers.call(producer, Stage.note_missing, work, port, which)
        result(told, producer)
