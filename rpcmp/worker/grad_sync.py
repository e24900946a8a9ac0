"""What workers with the same parameters do together between their backwards and their steps.

    backward of the last micro-batch ──gradients, bucket by bucket──┐
    after it     the rest of the sum, and replica 0's buffers       └─> replicas have the same sum
                 tied parameters: other stages' gradients go to the owner
    the step     each replica steps its own optimizer, to the same parameters
    after that   tied parameters copy the owner; replicas copy replica 0, if hosts differ

Rounds that only accumulate gradients do none of this. The driver requests the sum before it steps.
A worker without replicas and without tied parameters has nothing to exchange, so each of these
calls does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from rpcmp.config.topology import member_name
from rpcmp.errors import ConfigError, JobError, RpcmpError, StageError, WorkerDiedError
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc.messages import Peer
from rpcmp.rpc.shared_memory import OwnMemory
from rpcmp.worker.bucket_allreduce import BucketAllReduce
from rpcmp.worker.buckets import GradientReadyTracker
from rpcmp.worker.failure import stage_failure
from rpcmp.worker.mailbox import ReplicaBroadcast, TensorMailbox, TiedParameters
from rpcmp.worker.model import StageModel


class GradientSync:
    """One worker's side; its methods run on the compute thread, except `abort`.

    Attributes:
        all_reduce: sums over replicas; answers their requests.
        mailbox: answers requests for this worker's tensors.
    """

    def __init__(
        self,
        assignment: Assignment,
        model: StageModel,
        peer: Callable[[str], Peer],
        memory_of: Callable[[], OwnMemory],
    ) -> None:
        self._own = own = assignment.member
        config = assignment.config

        def num_replicas(stage: str) -> int:
            return config.turns_of(stage).num_replicas

        tied = {each.name for group in assignment.tied for each in group}
        _require_dense(model, own.num_replicas > 1, tied)
        replicas = [peer(member_name(own.stage, rank)) for rank in range(own.num_replicas)]
        trained = [value for _, value in model.named_parameters() if value.requires_grad]
        self.mailbox = TensorMailbox()
        self.all_reduce = BucketAllReduce(
            trained if len(replicas) > 1 else [], own.replica, replicas, memory_of
        )
        self._tracker = GradientReadyTracker(
            self.all_reduce.parameters,
            [bucket.indices for bucket in self.all_reduce.buckets],
            lambda bucket: self.all_reduce.launch(self._round, bucket, computes=True),
        )
        self._broadcast = ReplicaBroadcast(own, model, self.mailbox, replicas[0])
        self._tied = TiedParameters(own, model, assignment.tied, num_replicas, self.mailbox, peer)
        self._round = 0
        self._summed_round = 0
        self._has_sum = False
        self._copies_parameters = False

    def start_round(self, round_number: int, num_microbatches: int, is_early: bool) -> None:
        """Start to watch gradients, before a training round's first action."""
        if round_number == self._round:
            return
        self._round = round_number
        if self._has_sum and self._own.replica:
            # Gradients are to be added to a sum, which must count once: at replica 0.
            for parameter in self.all_reduce.parameters:
                parameter.grad = None
        self._has_sum = False
        self._tracker.start_round(num_microbatches, is_early)
        if is_early:
            self.all_reduce.expect(round_number)

    def sum(self, round_number: int, step: int) -> None:
        """Complete the gradients that this worker's optimizer needs; waits for other workers."""
        with self._named(step):
            self.start_round(round_number, 0, is_early=False)  # if it had no action here
            for bucket in self._tracker.finish_round():
                self.all_reduce.launch(round_number, bucket, computes=False)
            finish_buffers = self._broadcast.start_buffers(round_number)
            self.all_reduce.finish(round_number)  # stage.py [12]
            self._has_sum = True
            self._summed_round = round_number
            finish_buffers()
            self._tied.sum(round_number)

    def after_step(self, step: int) -> None:
        """Copy parameters that other workers own; called after the optimizer's step."""
        with self._named(step):
            self._has_sum = False
            if self._copies_parameters:
                self._broadcast.copy_parameters(self._summed_round, step)
            self._tied.after_step(self._summed_round, step)

    def sync_initial_state(self, copies_parameters: bool) -> None:
        """Copy the state of replica 0 and of the owners of tied parameters.

        Replica 0's parameters are copied after each step as well, if `copies_parameters`.
        """
        self._tied.sync_initial_state()
        self._broadcast.sync_initial_state()
        self._copies_parameters = copies_parameters

    def abort(self, first: int, last: int, cause: RpcmpError | None = None) -> None:
        """Free all workers that wait for this one in the rounds from `first` to `last`."""
        error = cause or JobError(f"stage {self._own.label!r}: the step was aborted")
        self.all_reduce.abort(first, last, error)
        self.mailbox.abort(first, last, error)

    @contextlib.contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Turn errors into StageErrors of this worker.

        Errors of another worker are StageErrors already, and a lost worker's supervisor knows more.
        """
        try:
            yield
        except (WorkerDiedError, StageError):
            raise
        except Exception as error:
            raise stage_failure(self._own.label, "sum", error, step) from error


def _require_dense(model: StageModel, is_replicated: bool, tied: Collection[str]) -> None:
    """Refuse layers whose gradients are sparse, where gradients of several workers are summed."""
    for prefix, module in model.stateful():
        for path, part in module.named_modules():
            name = f"{prefix}{path}.weight" if path else f"{prefix}weight"
            if getattr(part, "sparse", False) is True and (is_replicated or name in tied):
                raise ConfigError(
                    f"{name!r} gets sparse gradients, which cannot be summed over workers: make "
                    "its layer with sparse=False"
                )
