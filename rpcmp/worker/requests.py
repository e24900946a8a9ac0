"""Forward requests: one bundle of micro-batches at a stage, from request to answer.

    a reader asks ──> ask the inputs ──> all arrived: queue the forward ──> answer all readers

No thread waits: every arrow is a callback. Failures travel as answers. In training the sink's
reader is a TrainStepRunner in the same process, with one thread per bundle in flight.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
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
from rpcmp.data.batch_server import SliceFetcher
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.pipelining.schedule import Action
from rpcmp.rpc.messages import (
    Bundle,
    MicrobatchMeta,
    Mode,
    Peer,
    StageOutputs,
    StepReport,
)
from rpcmp.rpc.shared_memory import Sharing
from rpcmp.rpc.transport import NOBODY, Raised, Transport, result, when_all
from rpcmp.worker.backward import Failures, stage_error
from rpcmp.worker.copies import Received
from rpcmp.worker.executor import ComputeThread, Task
from rpcmp.worker.forward import Computed, Execution

DRIVER_PORT = 0
"""The sink's only port. Its reader wants the loss (TrainStepRunner) or the outputs (the driver)."""


class Inputs:
    """The inputs of one stage: answers of other stages, and slices of the batch.

    Args:
        share: the bundles that this replica of the stage computes.
        assignment_of: returns which replica of another stage computes which bundle.
        peer: returns another worker of the group by its name.
        loader: loads this stage's samples; None: the driver has the batch.

    Attributes:
        references: what the stage reads, in order.
    """

    def __init__(
        self,
        graph: Graph,
        stage: str,
        share: ReplicaShare,
        assignment_of: Callable[[str], ReplicaAssignment],
        peer: Callable[[str], Peer],
        transport: Transport,
        loader: StageDataLoader | None = None,
    ) -> None:
        self.references = graph.inputs[stage]
        self._ports = [_port(graph, stage, index) for index in range(len(self.references))]
        self._is_sink = graph.sink == stage
        self._peer = peer
        self._slices = SliceFetcher(share, transport)
        self._loader = loader
        self._assignments = {
            reference.producer: assignment_of(reference.producer)
            for reference in self.references
            if not reference.from_batch
        }

    def ask(self, bundle: Bundle, callback: Callable[[list[Any]], None]) -> None:
        """Request all inputs of a bundle's forward, and call `callback` with the answers.

        These are in the order of the references, followed by the targets if a sink needs them. Each
        is a list of one StageOutputs per micro-batch, or a Raised.
        """
        references = list(self.references)
        if self._is_sink and bundle.round.mode is not Mode.PREDICT:
            references.append(Reference(SOURCES[1]))
        when_all([self._ask_one(bundle, *each) for each in enumerate(references)], callback)

    def mark_none_gradients(
        self, meta: MicrobatchMeta, bundle: int, index: int, tensors: list[int]
    ) -> None:
        """Tell the producer of input `index` which of its tensors get no gradient; blocks."""
        producer = self._producer(bundle, index)
        port = self._ports[index]
        done = producer.mark_none_gradients(meta.round.number, meta.number, port, tensors)
        result(done, producer.name)

    def forget(self, last: int) -> None:
        """Drop what was requested for rounds up to `last`, which were aborted."""
        self._slices.forget()
        if self._loader is not None:
            self._loader.forget(last)

    def _producer(self, bundle: int, index: int) -> Peer:
        stage = self.references[index].producer
        return self._peer(member_name(stage, self._assignments[stage].owner(bundle)))

    def _ask_one(self, bundle: Bundle, index: int, reference: Reference) -> tuple[str, Future[Any]]:
        if not reference.from_batch:
            producer = self._producer(bundle.number, index)
            return producer.name, producer.forward(bundle, self._ports[index])  # stage.py [4]
        if self._loader is not None and bundle.round.batch_id:
            return NOBODY, self._loader.get(bundle, reference)  # stage.py [5]
        return NOBODY, self._slices.get(bundle, reference.producer, reference.path, index)


def _port(graph: Graph, stage: str, index: int) -> int:
    """Return the port of its producer that an input is; 0 for an input from the batch."""
    reference = graph.inputs[stage][index]
    if reference.from_batch:
        return 0
    return graph.ports(reference.producer).index(Port(stage, index, reference.path))


class ForwardRequests:
    """The requests that a stage has not answered to all readers yet. Thread-safe.

    Args:
        worker: the worker's label, for errors and reports.
        num_ports: number of the stage's readers.
        share: the bundles that it computes.
        last_report: returns the report of the step before.
    """

    def __init__(
        self,
        worker: str,
        inputs: Inputs,
        num_ports: int,
        share: ReplicaShare,
        compute: ComputeThread,
        execution: Execution,
        failures: Failures,
        last_report: Callable[[], StepReport | None],
    ) -> None:
        self._worker = worker
        self._inputs = inputs
        self._num_ports = num_ports
        self._share = share
        self._compute = compute
        self._execution = execution
        self._failures = failures
        self._last_report = last_report
        self._lock = threading.Lock()
        self._pending: dict[Bundle, _PendingForward] = {}
        self._aborted_round = 0

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, bundle: Bundle, port: int, sharing: Sharing = Sharing.NONE) -> Future[Any]:
        """Return a future of the answer for one reader; see `Stage.forward`."""
        with self._lock:
            if bundle.round.number <= self._aborted_round:  # the abort has overtaken the request
                answer: Future[Any] = Future()
                answer.set_result(self._aborted(bundle))
                return answer
            pending = self._pending.get(bundle)
            is_first = pending is None
            if pending is None:
                pending = self._pending[bundle] = _PendingForward(bundle, self._num_ports)
            answer = pending.ask(port, sharing)
            self._forget_if_served(pending)
        if is_first:
            self._compute.start_round(bundle.round)  # stage.py [4]
            self._inputs.ask(bundle, functools.partial(self._arrived, pending))
        return answer

    def refuse(self, last: int) -> None:
        """Answer requests for rounds up to `last`, which were aborted, with an error."""
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()

    def _arrived(self, pending: _PendingForward, answers: list[Any]) -> None:
        failed = next((answer for answer in answers if isinstance(answer, Raised)), None)
        if failed is not None:
            self._answer(pending, [failed] * self._num_ports)
            return
        bundle = pending.bundle
        metas = bundle.microbatches
        try:
            received = [
                self._execution.receive([each.opened() for each in inputs])
                for inputs in zip(*answers, strict=True)
            ]
        except Exception as error:  # of a device that is lost: its memory cannot be opened
            self._fail(pending, stage_error(self._worker, "forward", metas[0], error))
            return
        sharing = dict(pending.sharing)
        parts = [
            functools.partial(self._forward, pending, meta, inputs, sharing, meta is metas[-1])
            for meta, inputs in zip(metas, received, strict=True)
        ]
        task = Task(parts, metas[0].number, functools.partial(self._cancel, pending))
        # stage.py [6]
        self._compute.submit(bundle.round.number, Action.FORWARD, bundle.number, task)

    def _forward(
        self,
        pending: _PendingForward,
        meta: MicrobatchMeta,
        received: Received,
        sharing: Mapping[int, Sharing],
        is_last: bool,
    ) -> None:
        """Compute one micro-batch. The last one answers, or the first one that fails."""
        if pending.is_answered:
            return
        try:
            if self._failures.broken is not None:
                raise self._failures.broken
            pending.computed.append(self._execution.forward(meta, received, sharing))
        except RpcmpError as error:
            self._fail(pending, error)
            return
        if is_last:
            first = pending.computed[0].received

            def send(answers: list[list[Any]]) -> None:
                # stage.py [8]
                self._answer(pending, self._with_reports(pending.bundle, answers, first))

            def failed(error: BaseException) -> None:
                self._fail(pending, stage_error(self._worker, "forward", meta, error))

            self._execution.answer(pending.bundle, pending.computed, send, failed)

    def _fail(self, pending: _PendingForward, error: RpcmpError) -> None:
        raised = self._failures.add(pending.bundle.round.number, error)
        self._answer(pending, [raised] * self._num_ports)

    def _with_reports(
        self, bundle: Bundle, answers: list[list[Any]], received: list[StageOutputs]
    ) -> list[list[Any]]:
        """Add the step before's reports of this worker and its inputs to a step's first answer."""
        if not bundle.round.is_training:
            return answers
        reports = {k: v for answer in received for k, v in (answer.reports or {}).items()}
        is_first = bundle.number == self._share.numbers(bundle.round.num_bundles)[0]
        if is_first and (own := self._last_report()) is not None:
            reports[self._worker] = own
        if not reports:
            return answers
        return [[first._replace(reports=reports), *rest] for first, *rest in answers]

    def _cancel(self, pending: _PendingForward) -> None:
        self._answer(pending, [self._aborted(pending.bundle)] * self._num_ports)

    def _answer(self, pending: _PendingForward, values: list[Any]) -> None:
        with self._lock:
            pending.is_answered = True
            pending.computed = []
            self._forget_if_served(pending)
        for future, value in zip(pending.answers, values, strict=True):
            future.set_result(value)

    def _forget_if_served(self, pending: _PendingForward) -> None:
        if pending.is_answered and not pending.unasked_ports:
            self._pending.pop(pending.bundle, None)

    def _aborted(self, bundle: Bundle) -> Raised:
        text = f"step {bundle.round.step} was aborted at stage {self._worker!r}"
        return Raised(to_wire(JobError(text)))


class _PendingForward:
    """A bundle that is not computed yet, or that some reader has not asked for yet.

    Attributes:
        sharing: ports whose readers share memory with this process, as far as they have asked.
    """

    def __init__(self, bundle: Bundle, num_ports: int) -> None:
        self.bundle = bundle
        self.answers: list[Future[Any]] = [Future() for _ in range(num_ports)]
        self.unasked_ports = set(range(num_ports))
        self.sharing: dict[int, Sharing] = {}
        self.computed: list[Computed] = []
        self.is_answered = False

    def ask(self, port: int, sharing: Sharing) -> Future[Any]:
        self.unasked_ports.discard(port)
        if sharing:
            self.sharing[port] = sharing
        return self.answers[port]
