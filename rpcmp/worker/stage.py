"""A stage as the group sees it: asks its inputs, computes, answers its readers.

    conductor ──(1)──> sink ──(2)──> ... ──(2)──> first stage ──(2)──> driver: the batch's slices
              <──(5)──      <──(4)──     <──(4)──      (3)

(1) The conductor, in the sink's own process, asks the sink for one micro-batch; outside of training
the driver does. (2) Each stage, when first asked, asks all that it reads; nobody waits in a thread.
(3) When the answers are there, the compute thread runs the forward in its turn. (4) Activations
travel as responses, which distributed autograd records. (5) The conductor gets the loss and
differentiates it; gradients go the same way back, from boundary to boundary.

A failure is an answer as well: it travels down the responses, is remembered at its stage, and the
driver's `abort` frees whoever still waits.
"""

from __future__ import annotations

import functools
import platform
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp import digest, host, transport
from rpcmp.errors import JobError, StageError, to_wire
from rpcmp.graph import SOURCES, Graph, Port
from rpcmp.members import DRIVER, member
from rpcmp.plan import Assignment
from rpcmp.schedule import Action, Limits, policy
from rpcmp.transport import Raised
from rpcmp.work import End, Mode, Outputs, StepReport, Work
from rpcmp.worker.backward import Backwards, Missing
from rpcmp.worker.compute import ComputeThread
from rpcmp.worker.conductor import Conductor
from rpcmp.worker.execution import Execution
from rpcmp.worker.memory import Meter
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.rounds import Round, Task
from rpcmp.worker.slices import Slices

DRIVER_PORT = 0
"""The sink's only port: its reader wants the loss (the conductor) or the outputs (the driver)."""

_WIRE_DTYPES = {None: None, "bfloat16": torch.bfloat16}


class Stage:
    """One stage of the model: built before the process joins the group, served to it after.

    Args:
        assignment: which stage of which job.

    Raises:
        RpcmpError: the user's factories fail; see StageModel.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.name = assignment.stage_name
        self._graph = assignment.config.graph()
        self._references = self._graph.inputs[self.name]
        self._producer_ports = [
            _port(self._graph, self.name, index) for index in range(len(self._references))
        ]
        ports = self._graph.ports(self.name) or (Port(DRIVER, 0, ()),)
        self.model = StageModel(assignment)
        self._limits = assignment.limits
        self._compute = ComputeThread(policy(assignment.config.schedule))
        missing = Missing(self._take_missing, self._tell_missing)
        self._backwards = Backwards(
            self.name, self._compute, self._limits.splits, missing, self._note, self._note_broken
        )
        self._execution = Execution(
            self.name,
            self.model,
            self._references,
            ports,
            self._backwards,
            recompute=assignment.stage.recompute,
            wire_dtype=_WIRE_DTYPES[assignment.config.wire_dtype],
        )
        self.optimizer = StageOptimizer(self.name, self.model, assignment, self._compute)
        self.finished = threading.Event()
        self._num_ports = len(ports)
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._missing: dict[tuple[int, int], dict[int, list[int]]] = {}
        self._failures: list[tuple[int, Raised]] = []
        self._aborted_round = 0
        self._broken: StageError | None = None
        self._slices = Slices()
        self._conductor = Conductor(
            self.name, lambda work: self.forward(work, DRIVER_PORT), assignment.in_flight
        )
        self._meter = Meter(self.model.device)

    # What the other processes call.

    def forward(self, work: Work, port: int) -> Future[Any]:
        """The answer for one reader: Outputs; from the sink, Outputs or Evaluated; or Raised."""
        key = (work.round, work.microbatch)
        with self._lock:
            if work.round <= self._aborted_round:  # asked before the abort, come after it
                return self._at_once(self._aborted(work))
            pending = self._pending.get(key)
            first = pending is None
            if pending is None:
                pending = self._pending[key] = _Pending(work, self._num_ports)
            answer = pending.ask(port)
            self._forget_if_served(pending)
        if first:
            self._gather(pending)
        return answer

    def train(self, works: list[Work], after: int) -> Future[Any]:
        """Forward and backward of a round, asked of the sink; see Conductor."""
        return self._conductor.train(works, after)

    def abort(self, first: int, last: int) -> list[Raised]:
        """Fail all that waits in the rounds from `first` to `last`; returns what failed here."""
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)
        self._compute.abort(first, last)  # before the failures are forgotten; see `_finish`
        with self._lock:
            failures = [raised for number, raised in self._failures if first <= number <= last]
            self._failures.clear()
            self._pending.clear()
            self._missing.clear()
        self._slices.forget()
        return failures

    def note_missing(self, work: Work, port: int, which: list[int]) -> None:
        """Hear from a reader that it has no gradients for some tensors of its answer."""
        with self._lock:
            self._missing.setdefault((work.round, work.microbatch), {})[port] = which

    def settle(self) -> Future[Any]:
        """The StepReport of the last step, or None, once that is done.

        Raises:
            StageError: that step failed here, in its weight gradients or its optimizer.
        """

        def report() -> StepReport | None:
            if self._broken is not None:
                raise self._broken
            return self.optimizer.report

        return self._compute.future(report)

    def reschedule(self, schedule: str, limits: dict[str, Limits]) -> Future[Any]:
        """Go on under another schedule; between two rounds.

        Args:
            schedule: its name.
            limits: of every stage, by name; of those that the assignment foresaw.
        """

        def switch() -> None:
            self._limits = limits[self.name]
            self._compute.policy = policy(schedule)
            self._backwards.splits = self._limits.splits

        return self._compute.future(switch)

    def digests(self) -> Future[Any]:
        """`digest.tensor_line` of each parameter and buffer, by name."""
        state = self.model.state_dict
        return self._compute.future(
            lambda: {name: digest.tensor_line(name, value) for name, value in state().items()}
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
        return {**transport.live_state(), "pending": len(self._pending)}

    def memory(self) -> dict[str, int]:
        """Bytes of this process's memory: when it was idle, and at its peak."""
        return self._meter.read()

    def host(self) -> dict[str, str]:
        """What decides this host's bits."""
        return host.facts()

    def trace(self, on: bool) -> Future[Any]:
        """Record every action from now on, or stop it; answers with the name of this host."""

        def switch() -> str:
            self._compute.recorder.traces = on
            return platform.node()

        return self._compute.future(switch)

    def take_spans(self) -> Future[Any]:
        """The actions that were recorded since this was last asked."""
        return self._compute.future(self._compute.recorder.take_spans)

    def clock(self) -> int:
        """This host's clock, that of the spans."""
        return time.perf_counter_ns()

    def finish(self) -> None:
        """Tell the worker to leave the group."""
        self.finished.set()

    # One micro-batch, from the first question to the last answer.

    def _gather(self, pending: _Pending) -> None:
        work = pending.work
        self._compute.begin(work.round, functools.partial(self._round, work))
        asked = {key: send() for key, send in self._questions(work)}
        transport.when_all(asked, functools.partial(self._arrived, pending))

    def _round(self, work: Work) -> Round:
        training = work.mode is Mode.TRAIN
        everything = Limits(work.num_microbatches, work.num_microbatches)
        return Round(
            step=work.step,
            num_microbatches=work.num_microbatches,
            limits=self._limits if training else everything,
            training=training,
            finish=functools.partial(self._finish, work),
            is_held=work.end is End.HOLD,
        )

    def _finish(self, work: Work) -> None:
        """What this stage does by itself after its last action of a round.

        No step where a backward failed: it counts as done, but the gradient lacks its part.
        """
        with self._lock:
            has_failed = any(number == work.round for number, _ in self._failures)
        if work.end is End.STEP and self._broken is None and not has_failed:
            try:
                self.optimizer.step_now()
            except StageError as error:
                self._broken = error

    def _questions(self, work: Work) -> Iterator[tuple[str, Callable[[], Future[Any]]]]:
        """All that a forward needs, in order; the keys say who is asked, and for what."""
        for index, reference in enumerate(self._references):
            if reference.from_batch:
                source = (work, reference.producer, reference.path, index)
                ask = functools.partial(self._slices.get, *source)
            else:
                question = (Stage.forward, work, self._producer_ports[index])
                ask = functools.partial(transport.call, member(reference.producer), *question)
            yield f"{reference} (input {index})", ask
        if self.model.is_sink and work.mode is not Mode.PREDICT:
            source = (work, SOURCES[1], (), len(self._references))
            yield "the targets", functools.partial(self._slices.get, *source)

    def _arrived(self, pending: _Pending, answers: list[Any]) -> None:
        failed = next((answer for answer in answers if isinstance(answer, Raised)), None)
        if failed is not None:
            self._answer(pending, [failed] * self._num_ports)
            return
        work = pending.work
        run = functools.partial(self._run_forward, pending, answers)
        cancel = functools.partial(self._answer, pending, [self._aborted(work)] * self._num_ports)
        self._compute.submit(work.round, Action.FORWARD, work.microbatch, Task(run, cancel))

    def _run_forward(self, pending: _Pending, answers: list[Any]) -> None:
        work = pending.work
        try:
            if self._broken is not None:
                raise self._broken
            values = self._execution.forward(work, answers)
        except StageError as error:
            values = [self._note(work, error)] * self._num_ports
        else:
            if work.microbatch == 0 and work.mode is Mode.TRAIN:
                reports = self._merge_reports(answers)
                values = [value._replace(reports=reports) for value in values]
        self._answer(pending, values)

    def _merge_reports(self, answers: list[Outputs]) -> dict[str, StepReport]:
        """What there is to say of the step before: by all that this stage reads, and by itself."""
        reports = {k: v for answer in answers for k, v in (answer.reports or {}).items()}
        own = self.optimizer.report
        return reports if own is None else {**reports, self.name: own}

    def _answer(self, pending: _Pending, values: list[Any]) -> None:
        with self._lock:
            pending.answered = True
            self._forget_if_served(pending)
        for future, value in zip(pending.answers, values, strict=True):
            future.set_result(value)

    def _forget_if_served(self, pending: _Pending) -> None:
        if pending.answered and not pending.not_asked:
            self._pending.pop((pending.work.round, pending.work.microbatch), None)

    def _note(self, work: Work, error: StageError) -> Raised:
        """Remember what failed here, for the driver's `abort` of that round to collect."""
        raised = Raised(to_wire(error))
        with self._lock:
            self._failures.append((work.round, raised))
        return raised

    def _note_broken(self, work: Work, error: StageError) -> None:
        """Remember what failed when nobody waited for it any more: this stage cannot go on."""
        self._note(work, error)
        self._broken = error

    def _take_missing(self, work: Work) -> dict[int, list[int]]:
        with self._lock:
            return self._missing.pop((work.round, work.microbatch), {})

    def _tell_missing(self, work: Work, index: int, which: list[int]) -> None:
        producer = self._references[index].producer
        told = transport.call(
            member(producer), Stage.note_missing, work, self._producer_ports[index], which
        )
        transport.result(told, producer)

    @staticmethod
    def _at_once(answer: Raised) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def _aborted(self, work: Work) -> Raised:
        return Raised(to_wire(JobError(f"step {work.step} was aborted at stage {self.name!r}")))


def _port(graph: Graph, stage: str, index: int) -> int:
    """Which of its producer's ports the input `index` of `stage` is; 0 for what the batch gives."""
    reference = graph.inputs[stage][index]
    if reference.from_batch:
        return 0
    return graph.ports(reference.producer).index(Port(stage, index, reference.path))


class _Pending:
    """A micro-batch that some reader has not asked for yet, or that is not computed yet."""

    def __init__(self, work: Work, num_ports: int) -> None:
        self.work = work
        self.answers: list[Future[Any]] = [Future() for _ in range(num_ports)]
        self.not_asked = set(range(num_ports))
        self.answered = False

    def ask(self, port: int) -> Future[Any]:
        self.not_asked.discard(port)
        return self.answers[port]
