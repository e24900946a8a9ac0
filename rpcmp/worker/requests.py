"""One bundle of micro-batches at a stage, from the first question to the last answer.

    a reader asks ──> ask the inputs ──> all are there: queue the forward ──> answer the readers

Nobody waits in a thread: every arrow is a callback. A failure is an answer as well.

What a stage reads for a bundle of micro-batches: other stages' answers, slices of the batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from rpcmp.config.topology import (
    SOURCES,
    Graph,
    Port,
    Reference,
    ReplicaAssignment,
    ReplicaShare,
    member_name,
)
from rpcmp.data.batch_prefetch import Slices
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.pipelining.schedule import Action
from rpcmp.rpc.messages import Bundle, Mode, StageOutputs, StepReport
from rpcmp.rpc.transport import NOBODY, Raised, Transport, when_all
from rpcmp.worker.backward import Failures
from rpcmp.worker.executor import ComputeThread, Task
from rpcmp.worker.forward import Computed, Execution


class Inputs:
    """The inputs of one stage.

    Args:
        graph: who reads whom.
        stage: whose inputs.
        own: which bundles this replica of it computes.
        turns: which replica of another stage computes which.
        forward: the method by which another stage is asked, with a bundle and a port.
        peers: the other members of the group.
        feed: what this stage loads itself; None: the driver has all of the batch.

    Attributes:
        references: what it reads, in order.
        ports: for each of them, which of its producer's ports this is; 0 for what the batch gives.
    """

    def __init__(
        self,
        graph: Graph,
        stage: str,
        own: ReplicaShare,
        turns: Callable[[str], ReplicaAssignment],
        forward: Callable[..., Future[Any]],
        peers: Transport,
        feed: StageDataLoader | None = None,
    ) -> None:
        self.references = graph.inputs[stage]
        self.ports = [_port(graph, stage, index) for index in range(len(self.references))]
        self._is_sink = graph.sink == stage
        self._forward = forward
        self._peers = peers
        self._slices = Slices(own, peers)
        self._feed = feed
        self._turns = {
            reference.producer: turns(reference.producer)
            for reference in self.references
            if not reference.from_batch
        }

    def ask(self, bundle: Bundle, callback: Callable[[list[Any]], None]) -> None:
        """Ask for all that a forward needs; `callback` gets the answers.

        They are in the order of the references, for a sink that needs them the targets last: a list
        of Outputs, one a micro-batch, or a Raised.
        """
        asked = [self._ask_one(bundle, index) for index in range(len(self.references))]
        if self._is_sink and bundle.mode is not Mode.PREDICT:
            targets = self._ask_batch(bundle, Reference(SOURCES[1]), len(self.references))
            asked.append((NOBODY, targets))
        when_all(asked, callback)

    def forget(self, last: int) -> None:
        """Let go of what was asked for and will not be taken: rounds up to `last` were aborted."""
        self._slices.forget()
        if self._feed is not None:
            self._feed.forget(last)

    def producer(self, index: int, bundle: Bundle) -> str:
        """The worker that computes input `index` of a bundle."""
        stage = self.references[index].producer
        return member_name(stage, self._turns[stage].owner(bundle.number))

    def _ask_one(self, bundle: Bundle, index: int) -> tuple[str, Future[Any]]:
        reference = self.references[index]
        if reference.from_batch:
            return NOBODY, self._ask_batch(bundle, reference, index)
        producer = self.producer(index, bundle)
        return producer, self._peers.call(producer, self._forward, bundle, self.ports[index])

    def _ask_batch(self, bundle: Bundle, reference: Reference, index: int) -> Future[Any]:
        if self._feed is not None and bundle.works[0].drawn:
            return self._feed.get(bundle, reference)
        return self._slices.get(bundle, reference.producer, reference.path, index)


def _port(graph: Graph, stage: str, index: int) -> int:
    reference = graph.inputs[stage][index]
    if reference.from_batch:
        return 0
    return graph.ports(reference.producer).index(Port(stage, index, reference.path))


class ForwardRequests:
    """The bundles that a stage has been asked for and has not answered to everybody.

    Args:
        stage: the worker's name, for errors and reports.
        inputs: what it reads.
        num_ports: how many read it.
        share: which bundles it computes.
        compute: where forwards run.
        execution: what they are.
        failures: told of those that fail.
        begin: called with each bundle when it is first heard of.
        report: what this stage has to say of the step before.
    """

    def __init__(
        self,
        stage: str,
        inputs: Inputs,
        num_ports: int,
        share: ReplicaShare,
        compute: ComputeThread,
        execution: Execution,
        failures: Failures,
        begin: Callable[[Bundle], None],
        report: Callable[[], StepReport | None],
    ) -> None:
        self._stage = stage
        self._inputs = inputs
        self._num_ports = num_ports
        self._share = share
        self._compute = compute
        self._execution = execution
        self._failures = failures
        self._begin = begin
        self._report = report
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, int], _PendingForward] = {}
        self._aborted_round = 0

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, bundle: Bundle, port: int) -> Future[Any]:
        """The answer for one reader; see `Stage.forward`."""
        key = (bundle.round, bundle.number)
        with self._lock:
            if bundle.round <= self._aborted_round:  # asked before the abort, come after it
                answer: Future[Any] = Future()
                answer.set_result(self._aborted(bundle))
                return answer
            pending = self._pending.get(key)
            first = pending is None
            if pending is None:
                pending = self._pending[key] = _PendingForward(bundle, self._num_ports)
            answer = pending.ask(port)
            self._forget_if_served(pending)
        if first:
            self._begin(bundle)
            self._inputs.ask(bundle, functools.partial(self._arrived, pending))
        return answer

    def refuse(self, last: int) -> None:
        """Answer questions for rounds up to `last`, which were aborted, with an error."""
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)

    def forget(self) -> None:
        """Let go of what was asked for and will not be answered."""
        with self._lock:
            self._pending.clear()
            last = self._aborted_round
        self._inputs.forget(last)

    def _arrived(self, pending: _PendingForward, answers: list[Any]) -> None:
        failed = next((answer for answer in answers if isinstance(answer, Raised)), None)
        if failed is not None:
            self._answer(pending, [failed] * self._num_ports)
            return
        bundle = pending.bundle
        received = [list(of_one) for of_one in zip(*answers, strict=True)]
        compute = functools.partial(self._forward, pending, received)
        parts = [functools.partial(compute, index) for index in range(len(bundle.works))]
        aborted = [self._aborted(bundle)] * self._num_ports
        task = Task(
            parts, bundle.works[0].microbatch, functools.partial(self._answer, pending, aborted)
        )
        self._compute.submit(bundle.round, Action.FORWARD, bundle.number, task)

    def _forward(
        self, pending: _PendingForward, received: list[list[StageOutputs]], index: int
    ) -> None:
        """Compute one micro-batch; the last one answers, or the first one that fails.

        Args:
            received: for each micro-batch, what there is of each input.
        """
        if pending.answered:
            return
        bundle = pending.bundle
        try:
            if self._failures.broken is not None:
                raise self._failures.broken
            pending.computed.append(self._execution.forward(bundle.works[index], received[index]))
        except RpcmpError as error:
            raised = self._failures.note(bundle.works[index], error)
            self._answer(pending, [raised] * self._num_ports)
            return
        if len(pending.computed) == len(bundle.works):
            answers = self._execution.answer(bundle, pending.computed)
            self._answer(pending, self._with_reports(bundle, answers, received[0]))

    def _with_reports(
        self, bundle: Bundle, answers: list[list[Any]], received: list[StageOutputs]
    ) -> list[list[Any]]:
        """With a worker's first answers of a step, what it and all that it reads have to say."""
        if bundle.mode is not Mode.TRAIN:
            return answers
        reports = {k: v for answer in received for k, v in (answer.reports or {}).items()}
        is_first = bundle.number == self._share.numbers(bundle.num_bundles)[0]
        if is_first and (own := self._report()) is not None:
            reports[self._stage] = own
        if not reports:
            return answers
        return [[first._replace(reports=reports), *rest] for first, *rest in answers]

    def _answer(self, pending: _PendingForward, values: list[Any]) -> None:
        with self._lock:
            pending.answered = True
            pending.computed = []
            self._forget_if_served(pending)
        for future, value in zip(pending.answers, values, strict=True):
            future.set_result(value)

    def _forget_if_served(self, pending: _PendingForward) -> None:
        if pending.answered and not pending.not_asked:
            self._pending.pop((pending.bundle.round, pending.bundle.number), None)

    def _aborted(self, bundle: Bundle) -> Raised:
        return Raised(to_wire(JobError(f"step {bundle.step} was aborted at stage {self._stage!r}")))


class _PendingForward:
    """A bundle that some reader has not asked for yet, or that is not computed yet."""

    def __init__(self, bundle: Bundle, num_ports: int) -> None:
        self.bundle = bundle
        self.answers: list[Future[Any]] = [Future() for _ in range(num_ports)]
        self.not_asked = set(range(num_ports))
        self.computed: list[Computed] = []
        self.answered = False

    def ask(self, port: int) -> Future[Any]:
        self.not_asked.discard(port)
        return self.answers[port]
