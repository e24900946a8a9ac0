"""A stage as the group sees it: asks its inputs, computes, answers its readers.

    driver ──(1)──> sink ──(2)──> ... ──(2)──> first stage ──(2)──> driver: the batch's slice
           <──(5)──      <──(4)──     <──(4)──      (3)

(1) The driver asks the sink for one micro-batch. (2) Each stage, when first asked, asks all that it
reads; nobody waits in a thread. (3) When the answers are there, the compute thread runs the forward
in its turn. (4) Activations travel as responses, which distributed autograd records. (5) The driver
gets the loss and differentiates it; gradients go the same way back, from boundary to boundary.

A failure is an answer as well: it travels down the responses, is remembered at its stage, and the
driver's `abort` frees whoever still waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcmp import digest, host, transport
from rpcmp.errors import JobError, StageError, to_wire
from rpcmp.graph import SOURCES, Port
from rpcmp.members import DRIVER, member
from rpcmp.plan import Assignment
from rpcmp.schedule import Action, policy
from rpcmp.source import Source
from rpcmp.transport import Raised
from rpcmp.work import Mode, Work
from rpcmp.worker.compute import ComputeThread, Task
from rpcmp.worker.execution import Execution
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer

DRIVER_PORT = 0
"""The sink's only port: its reader is the driver, which wants the loss or the outputs."""


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
        ports = self._graph.ports(self.name) or (Port(DRIVER, 0, ()),)
        self.model = StageModel(assignment)
        self._compute = ComputeThread(policy(assignment.config.schedule), assignment.limit)
        self._execution = Execution(
            self.name, self.model, self._references, ports, self._compute, self._note
        )
        self.optimizer = StageOptimizer(self.name, self.model, assignment, self._compute)
        self.finished = threading.Event()
        self._num_ports = len(ports)
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._failures: list[tuple[int, Raised]] = []
        self._aborted_round = -1

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

    def abort(self, round_number: int) -> list[Raised]:
        """Fail all that waits in the rounds up to this one; returns what failed here in this."""
        with self._lock:
            self._aborted_round = max(round_number, self._aborted_round)
            failures = [raised for number, raised in self._failures if number == round_number]
            self._failures.clear()
        self._compute.abort(round_number)
        with self._lock:
            self._pending.clear()
        return failures

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

    def host(self) -> dict[str, str]:
        """What decides this host's bits."""
        return host.facts()

    def finish(self) -> None:
        """Tell the worker to leave the group."""
        self.finished.set()

    # One micro-batch, from the first question to the last answer.

    def _gather(self, pending: _Pending) -> None:
        work = pending.work
        self._compute.begin(work.round, work.num_microbatches, work.mode is Mode.TRAIN)
        asked = {key: send() for key, send in self._questions(work)}
        transport.when_all(asked, functools.partial(self._arrived, pending))

    def _questions(self, work: Work) -> Iterator[tuple[str, Callable[[], Future[Any]]]]:
        """All that a forward needs, in order; the keys say who is asked, and for what."""
        for index, reference in enumerate(self._references):
            if reference.from_batch:
                question: tuple[Any, ...] = (Source.slice, work, reference.producer, reference.path)
                to = DRIVER
            else:
                edge = Port(self.name, index, reference.path)
                port = self._graph.ports(reference.producer).index(edge)
                question = (Stage.forward, work, port)
                to = member(reference.producer)
            yield f"{reference} (input {index})", functools.partial(transport.call, to, *question)
        if self.model.is_sink and work.mode is not Mode.PREDICT:
            question = (Source.slice, work, SOURCES[1], ())
            yield "the targets", functools.partial(transport.call, DRIVER, *question)

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
        try:
            values = self._execution.forward(pending.work, answers)
        except StageError as error:
            values = [self._note(pending.work, error)] * self._num_ports
        self._answer(pending, values)

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

    @staticmethod
    def _at_once(answer: Raised) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def _aborted(self, work: Work) -> Raised:
        return Raised(to_wire(JobError(f"step {work.step} was aborted at stage {self.name!r}")))


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
