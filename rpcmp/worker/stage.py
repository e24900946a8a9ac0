"""One stage of the model at one worker: its parts, and the calls that driver and peers make of it.

One training step, from the driver's loop to the optimizers and back. Double arrows are messages.
Each column is a process, each bracket its compute thread.

    driver                    sink                                 other stages
    [1] a step, one ahead
    [2] header, bundles ════> Stage.train
                              [3] per bundle: an autograd
                                  context, asks for the loss
                              [4] ask all inputs ════════════════> [4] and so on, to the first stage
        batch's slices  <════ [5] of the driver, or the own loader [5]
                              [6] all arrived: submit <═════╗      [6]
                              [                             ║      [
                              [7] forward of the layers     ║      [7]
                              [8] the loss, for [3], and    ╚═════ [8] one Boundary per bundle
                                  [9] queued at once
                              ]                                    ]
                              [9] backward from the loss; the
                                  engine waits in each Boundary ═> [9]
                              [                                    [
                              [10] gradients of the inputs         [10]
                              [11] weight gradients                [11]
                              [12] sum over workers that share parameters
                              [13] optimizer step                  [13]
                              [14] snapshot                        [14]
                              ]                                    ]
    [15] losses         <════ answer of Stage.train
    [16] the step's event

[1] The driver starts a step before it waits for the one before. [2] Its header travels in every
bundle. [4] A stage that is asked first starts the round and asks all that it reads; no thread
waits. [7] The schedule chooses the next action of the compute thread. [8] Answers are recorded by
distributed autograd, as results of one node per bundle. [9] Gradients take the same way back, from
Boundary to Boundary; the sink knows the gradient of its loss, so its own backward does not wait for
the engine. [11] An action of its own if the schedule splits backwards, else a part of [10]. [12]
Every stage goes on by itself; buckets that are complete are summed during [10] and [11]. [13] Steps
a scheduler of `scheduler_interval = "step"` too. [16] The reports of [13] travel in the first
answers of the next step, and complete the event of this one.

If the driver needs the gradients or the loss of all stages before they step (clipping, loss
scaling), the round is held: [12] and [13] are calls of the driver after [15],
`StageGroup.end_step`. Schedulers of epochs step between two steps, `Training._after_drained`.

A failure is an answer as well: it travels down the answers, the stage records it, and the driver's
`abort` frees all that still wait.

Comments in the code cite the numbers, such as `stage.py [4]`:

    [1] [16]         driver/training.py       [7] [12]         worker/executor.py
    [2] [15]         driver/rounds.py         [8] [9] [10]     worker/boundary.py
    [3] [9]          worker/train_step.py     [9] [10] [11]    worker/backward.py
    [4] [5] [6] [8]  worker/requests.py       [12]             worker/grad_sync.py
    [5]              data/batch_server.py     [12] [13] [14]   worker/stage.py
    [7]              worker/model.py          [13]             worker/optimizer.py
    [7] [8] [9]      worker/forward.py
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import DRIVER, Port, ReplicaShare
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import RpcmpError
from rpcmp.observability.events import Memory
from rpcmp.observability.trace.spans import Span
from rpcmp.pipelining.assignment import Assignment
from rpcmp.pipelining.devices import MemoryMeter, host_facts
from rpcmp.pipelining.schedule import InFlightLimits, policy
from rpcmp.process.activity import Activity
from rpcmp.rpc import tensors
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    Bundle,
    DatasetInfo,
    Peer,
    RoundHeader,
    StepReport,
    TensorKey,
)
from rpcmp.rpc.shared_memory import OwnMemory, Sharing
from rpcmp.rpc.transport import Raised, Transport
from rpcmp.worker.backward import Backwards, Failures
from rpcmp.worker.checks.first_forward import FirstForward
from rpcmp.worker.checks.inner_gradients import on_two_ways
from rpcmp.worker.copies import copies_of
from rpcmp.worker.executor import ComputeThread, ComputeThreadOwner, on_compute_thread
from rpcmp.worker.failure import stage_failure
from rpcmp.worker.forward import Execution
from rpcmp.worker.grad_sync import GradientSync
from rpcmp.worker.model import LossScale, StageModel
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.requests import ForwardRequests, Inputs
from rpcmp.worker.snapshots import StageSnapshots
from rpcmp.worker.train_step import TrainStepRunner

_WIRE_DTYPES = {None: None, "bfloat16": torch.bfloat16}


class Stage(ComputeThreadOwner):
    """One stage of the model. It is built before its process joins the group, and served after.

    Args:
        peer: returns another worker of the group by its name.
        loader: loads its samples; None: the driver has the batch.
        rehearses: whether to try that its optimizer can be restored.

    Attributes:
        snapshots: taken after its steps; None: it takes none.
        finished: set once the worker has to leave the group.
    """

    def __init__(
        self,
        assignment: Assignment,
        transport: Transport,
        peer: Callable[[str], Peer],
        activity: Activity | None = None,
        loader: StageDataLoader | None = None,
        rehearses: bool = True,
    ) -> None:
        config, stage = assignment.config, assignment.stage_name
        self.name = assignment.member.label
        self.snapshots: StageSnapshots | None = None
        self.finished = threading.Event()
        self._transport = transport
        self._loader = loader
        graph = config.graph()
        ports = graph.ports(stage) or (Port(DRIVER, 0, ()),)
        self._share = share = ReplicaShare(assignment.stage.turns, assignment.replica)
        self.model = StageModel(assignment)
        self._compute = ComputeThread(
            policy(config.options.schedule),
            assignment.limits,
            share,
            self._before_round,
            self._after_round,
            activity,
        )
        self._inputs = Inputs(graph, stage, share, config.turns_of, peer, transport, loader)
        self._failures = Failures()
        copies, mark = copies_of(self.model.device), self._inputs.mark_none_gradients
        self._backwards = Backwards(self.name, self._compute, mark, self._failures, copies)

        def memory_of() -> OwnMemory:  # the stage is built before its process joins the group
            return transport.memory

        scaling = config.loss_scaling
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
            memory_for=transport.memory_for,
            first=FirstForward(self.model, on_two_ways(graph, stage), config.has_equal_parts),
        )
        self._grad_sync = GradientSync(assignment, self.model, peer, memory_of)
        self.optimizer = StageOptimizer(
            self.model, assignment, self._compute, self._grad_sync.after_step, scale, rehearses
        )
        self._requests = ForwardRequests(
            self.name,
            self._inputs,
            len(ports),
            share,
            self._compute,
            execution,
            self._failures,
            lambda: self.optimizer.report,
        )
        self._step_runner = TrainStepRunner(
            self._requests, assignment.in_flight_per_replica, transport, is_scaled=scale is not None
        )
        self._meter = MemoryMeter(self.model.device)

    def vitals(self) -> dict[str, Any]:
        """Return the figures of a heartbeat; never blocks."""
        busy = self._compute.recorder.total
        return {
            "in_flight": self._compute.in_flight,
            "device_memory": self._meter.allocated(),
            "busy": {str(kind): nanoseconds / 1e9 for kind, nanoseconds in busy.items()},
        }

    # Calls of other stages; see rpcmp.rpc.messages.Peer.

    def forward(self, bundle: Bundle, port: int, sharing: Sharing = Sharing.NONE) -> Future[Any]:
        """Return a future of the answer for one reader, or a Raised.

        The answer has one StageOutputs per micro-batch; from the sink in an evaluation, Evaluated.

        Args:
            sharing: from which memory of this process the reader can take tensors.
        """
        return self._requests.ask(bundle, port, sharing)

    def mark_none_gradients(
        self, round_number: int, microbatch: int, port: int, tensors: list[int]
    ) -> None:
        self._backwards.mark_none_gradients(round_number, microbatch, port, tensors)

    def gradient_part(
        self, rank: int, round_number: int, bucket: int, shares_memory: bool
    ) -> Future[Any]:
        return self._grad_sync.all_reduce.part(rank, round_number, bucket, shares_memory)

    def gradient_total(self, round_number: int, bucket: int, shares_memory: bool) -> Future[Any]:
        return self._grad_sync.all_reduce.chunk_total(round_number, bucket, shares_memory)

    def get_tensors(self, key: TensorKey) -> Future[Any]:
        return self._grad_sync.mailbox.get(key)

    # Calls of the driver: rounds.

    def train(self, bundles: list[Bundle], after: int) -> Future[Any]:
        """Run forward and backward of a round, at the sink; see TrainStepRunner."""
        return self._step_runner.train(bundles, after)

    def stand_by(self, header: RoundHeader) -> None:
        """Take part in a round that has no bundle for this replica."""
        if self._loader is not None and header.batch_id:
            self._loader.skip(header)
        self._compute.start_round(header)

    def abort(self, first: int, last: int) -> list[Raised]:
        """Fail all that waits in rounds `first` to `last`; return the failures of this stage."""
        self._requests.refuse(last)  # requests that the abort has overtaken must not wait for ever
        self._grad_sync.abort(first, last)  # the compute thread may wait in a sum
        # Before failures are forgotten: `_after_round` reads them.
        self._compute.abort(first, last)
        failures = self._failures.take(first, last)
        self._requests.clear()
        self._inputs.forget(last)
        self._backwards.forget_marks()
        return failures

    @on_compute_thread
    def settle(self) -> StepReport | None:
        """Return the report of the last step, if there was one, once that is done."""
        if self._failures.broken is not None:
            raise self._failures.broken
        return self.optimizer.report

    @on_compute_thread
    def sum_gradients(self, round_number: int) -> None:
        """Sum all gradients that a step needs, after a round that has not done so by itself."""
        if (failed := self._failed(round_number)) is not None:
            raise failed
        self._sum_gradients(round_number)

    @on_compute_thread
    def sync_initial_state(self, copies_parameters: bool) -> None:
        """Copy the state of replica 0 and of the owners of tied parameters; see GradientSync."""
        self._grad_sync.sync_initial_state(copies_parameters)

    @on_compute_thread
    def reschedule(self, schedule: str, limits: dict[str, InFlightLimits]) -> None:
        """Switch to another schedule, with limits by stage, between two rounds."""
        self._compute.reschedule(policy(schedule), limits[self.optimizer.stage])

    @on_compute_thread
    def keep(self, version: int) -> None:
        self._snapshot(lambda snapshots: snapshots.take(version))

    @on_compute_thread
    def save(self, step: int) -> None:
        """Write the stage's state after `step`, the last one, to its disk."""
        self._snapshot(lambda snapshots: snapshots.save(step))

    # Calls of the driver: data.

    def dataset_info(self) -> DatasetInfo | None:
        return None if self._loader is None else self._loader.holding

    def epoch_order(self, epoch: int) -> Future[Any]:
        """Return the sample indices of an epoch, counted from 0, as int64."""
        if self._loader is None:
            raise RuntimeError("this stage loads no samples")
        return self._loader.order(epoch)

    def prefetch(self, batches: Sequence[BatchIndices]) -> Future[Any]:
        """Load mini-batches of coming rounds, if this stage loads samples itself.

        Returns:
            A future, of a stream's position after the last of them.
        """
        if self._loader is None:
            raise RuntimeError("this stage loads no samples")
        return self._loader.prefetch(batches)

    # Calls of the driver: the stage's state.

    def signature(self) -> dict[str, str]:
        """Return what replicas must agree on: names, dtypes and shapes of tensors, and the code."""
        return self.model.signature()

    @on_compute_thread
    def smallest_microbatch(self) -> int:
        return self.model.smallest_microbatch()

    @on_compute_thread
    def digests(self) -> dict[str, str]:
        """Return `tensors.tensor_line` of each parameter and buffer, by name."""
        return _digests(self.model.state_dict().items())

    @on_compute_thread
    def parameter_digests(self) -> dict[str, str]:
        """Return `tensors.tensor_line` of each parameter, by name."""
        return _digests(self.model.named_parameters())

    @on_compute_thread
    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers, on the host, by name."""
        state = self.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def state_names(self) -> list[str]:
        """The names of this stage's parameters and buffers in the unsplit model."""
        return list(self.model.named_state())

    @on_compute_thread
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    # Calls of the driver: figures.

    def live_state(self) -> dict[str, int]:
        """Return counts of what a step must not leave behind."""
        return {**self._transport.live_state(), "pending": len(self._requests)}

    def memory(self) -> Memory:
        """Return bytes of this process's memory: "idle", after it was built, and "peak"."""
        return {"idle": self._meter.idle, "peak": self._meter.peak()}

    def free_memory(self) -> tuple[str, int | None]:
        """Return which device it computes on, and how many bytes nobody uses there, if known."""
        return f"{platform.node()} {self.model.device}", self._meter.free()

    def cores(self) -> tuple[str, list[int]]:
        """Return the name of this host, and which of its cores may be used."""
        return platform.node(), sorted(os.sched_getaffinity(0))

    def host(self) -> dict[str, str]:
        return host_facts(self.model.device)

    @on_compute_thread
    def record_spans(self, steps: int) -> tuple[str, int]:
        """Keep the actions of the last `steps` steps; return this host's name and a cursor."""
        return platform.node(), self._compute.recorder.keep(steps)

    @on_compute_thread
    def read_spans(self, cursor: int, first_step: int, last_step: int) -> tuple[int, list[Span]]:
        """Return the next cursor, and the actions from `cursor` on of these steps."""
        return self._compute.recorder.read(cursor, first_step, last_step)

    def clock(self) -> int:
        """Return the time of this host's clock that the spans have."""
        return time.perf_counter_ns()

    def its_optimizer(self) -> StageOptimizer:
        """The part of this stage that the driver's optimizer keeps a reference to."""
        return self.optimizer

    def finish(self) -> None:
        self.finished.set()

    # Around a round, on the compute thread. Private: no message may name them.

    def _before_round(self, header: RoundHeader) -> None:
        if header.is_training:
            own = header.indices_in(self._share.numbers(header.num_bundles))
            is_early = header.after is not AfterRound.NOTHING
            self._grad_sync.start_round(header.number, len(own), is_early)

    def _after_round(self, header: RoundHeader) -> None:
        """Step the optimizer and take a snapshot, as requested by the header."""
        if self._failed(header.number) is not None:
            return  # a failed backward counts as done, but the gradient lacks its part
        try:
            if header.after is AfterRound.STEP:
                self._sum_gradients(header.number)  # [12]
                self.optimizer.step_now()  # [13]
            if header.version:
                self._snapshot(lambda s: s.take(header.version, header.save))  # [14]
        except RpcmpError as error:
            self._failures.broken = error
            self._grad_sync.abort(header.number, header.number, error)  # or others wait for ever

    def _failed(self, round_number: int) -> RpcmpError | None:
        """The error that left this round's gradient incomplete; aborts sums that wait for it."""
        failed = self._failures.first(round_number)
        if failed is not None:
            self._grad_sync.abort(round_number, round_number, failed)
        return failed

    def _sum_gradients(self, round_number: int) -> None:
        step = self.optimizer.steps + 1
        with self._compute.activity.during("sum", step):
            self._grad_sync.sum(round_number, step)

    def _snapshot(self, act: Callable[[StageSnapshots], None]) -> None:
        if self.snapshots is None:
            return
        try:
            act(self.snapshots)
        except Exception as error:
            note = " (with recovery.enabled = false nothing is stored)"
            raise stage_failure(
                self.name, "saving", error, self.optimizer.steps, note=note
            ) from error


def _digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensors.tensor_line(name, tensor) for name, tensor in named}


class RemoteStage:
    """A stage of another worker; see `rpcmp.rpc.messages.Peer`.

    What has tensors in its answer is told whether this process can read them from the other's
    memory.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self.name = name
        self._transport = transport

    @property
    def _shares_memory(self) -> bool:
        return self._transport.shares_memory(self.name)

    def forward(self, bundle: Bundle, port: int) -> Future[Any]:
        arguments = bundle, port, self._transport.sharing(self.name)
        return self._transport.call(self.name, Stage.forward, *arguments)

    def mark_none_gradients(
        self, round_number: int, microbatch: int, port: int, tensors: list[int]
    ) -> Future[Any]:
        method = Stage.mark_none_gradients
        return self._transport.call(self.name, method, round_number, microbatch, port, tensors)

    def gradient_part(self, rank: int, round_number: int, bucket: int) -> Future[Any]:
        arguments = rank, round_number, bucket, self._shares_memory
        return self._transport.call(self.name, Stage.gradient_part, *arguments)

    def gradient_total(self, round_number: int, bucket: int) -> Future[Any]:
        arguments = round_number, bucket, self._shares_memory
        return self._transport.call(self.name, Stage.gradient_total, *arguments)

    def get_tensors(self, key: TensorKey) -> Future[Any]:
        return self._transport.call(self.name, Stage.get_tensors, key)
