"""What a worker does together with others between its backwards and its optimizer's step.

(1) the replicas of a stage sum their gradients      rpcmp.worker.grad_sync.sync
(2) stages that share a parameter add theirs         rpcmp.worker.grad_sync.tied
(3) the optimizer steps
(4) all take over what somebody else decides

A worker without replicas and without shared parameters does nothing of it.

What the replicas of a stage do together, so that they stay one model.

    backward of the last micro-batch ──gradients, bucket by bucket──┐
    after it   the rest of the sum, and replica 0's buffers         └─> all have the same sum
    then       each steps its own optimizer, to the same parameters

A round whose gradients only add up does none of this; the driver then asks for the sum when
somebody wants to step.

What the replicas of a stage take over from replica 0.

    to begin with            parameters and buffers
    after each round         buffers
    after each step          parameters, where hosts differ

Batch normalization's running statistics are changed by the micro-batches that a replica has seen:
replica 0's count, as under DistributedDataParallel. They are final with the round's last backward,
so they travel while the gradients are summed. A buffer that is still what it was in the beginning,
a mask or a table of positions, does not travel. Parameters are equal anyway, but for hosts whose
processors round an optimizer's step otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import Member, member_name
from rpcmp.errors import JobError, RpcmpError, StageError, WorkerDiedError, one_line
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc.transport import Transport, result
from rpcmp.worker import option_overrides
from rpcmp.worker.grad_sync.bucket_allreduce import BucketAllReduce
from rpcmp.worker.grad_sync.mailbox import NEVER, Key, TensorMailbox
from rpcmp.worker.grad_sync.ready import GradientReadyTracker
from rpcmp.worker.grad_sync.tied import TiedParameters
from rpcmp.worker.model import StageModel

Ask = Callable[[str, Key], Callable[[], list[Any]]]
"""Asks for what another worker has on its board; what is returned waits for it."""


class ReplicaBroadcast:
    """One replica's side of it; on the compute thread.

    Args:
        own: which replica of which stage.
        model: its layers.
        board: where the others find what replica 0 has.
        ask: how to get it from there.
    """

    def __init__(self, own: Member, model: StageModel, board: TensorMailbox, ask: Ask) -> None:
        self._own, self._model = own, model
        self._board, self._ask = board, ask
        self._begun = 0
        self._first: list[Tensor] = []

    def unite(self) -> None:
        """Begin as what replica 0 is.

        Raises:
            RpcmpError: replica 0 is gone.
        """
        self._begun += 1
        key = (NEVER, f"replicas begin {self._begun}")
        self._take_over(key, [*self._parameters(), *self._buffers()])
        self._first = [buffer.detach().clone() for buffer in self._buffers()]

    def begin_buffers(self, round_number: int) -> Callable[[], None]:
        """Begin to exchange the buffers as they are after a round; what is returned ends it.

        It raises an RpcmpError where replica 0 is gone.
        """
        buffers, key = self._buffers(), (round_number, "buffers")
        if not self._own.replica:
            pairs = zip(buffers, self._first, strict=True)
            self._post(
                key,
                [None if option_overrides.are_equal(now, first) else now for now, first in pairs],
            )
        if not self._own.replica or not buffers:
            return lambda: None
        answer = self._ask(member_name(self._own.stage), key)

        def end() -> None:
            triples = zip(buffers, answer(), self._first, strict=True)
            _copy((buffer, first if now is None else now) for buffer, now, first in triples)

        return end

    def parameters(self, round_number: int, step: int) -> None:
        """Take over the parameters after a step.

        Raises:
            RpcmpError: replica 0 is gone.
        """
        self._take_over((round_number, f"replicas after step {step}"), self._parameters())

    def _take_over(self, key: Key, tensors: Sequence[Tensor]) -> None:
        if not self._own.replica:
            self._post(key, tensors)
        elif tensors:
            found = self._ask(member_name(self._own.stage), key)()
            _copy(zip(tensors, found, strict=True))

    def _post(self, key: Key, tensors: Sequence[Tensor | None]) -> None:
        if tensors:
            self._board.post(key, tensors, self._own.num_replicas - 1)

    def _parameters(self) -> list[Tensor]:
        return [value for _, value in self._model.named_parameters()]

    def _buffers(self) -> list[Tensor]:
        return [
            buffer for module in self._model.modules() for buffer in module.buffers(recurse=False)
        ]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)


Method = Callable[..., Future[Any]]


class ReplicaGroup:
    """One replica's side of it; all but the answers to others on the compute thread.

    Args:
        own: which replica of which stage.
        model: its layers.
        peers: the other members of the group.
        part, total: the methods by which another replica's `part` and `total` are asked for.
        following: what it takes over from replica 0.
    """

    def __init__(
        self,
        own: Member,
        model: StageModel,
        peers: Transport,
        part: Method,
        total: Method,
        following: ReplicaBroadcast,
    ) -> None:
        self._own = own
        names = [member_name(own.stage, replica) for replica in range(own.num_replicas)]
        parameters = [value for _, value in model.named_parameters() if value.requires_grad]
        others = _Others(peers, names, own.replica, part, total)
        self._summing = BucketAllReduce(parameters, own.replica, own.num_replicas, others)
        self._readiness = GradientReadyTracker(
            parameters, [bucket.indices for bucket in self._summing.buckets], self._launch
        )
        self._following = following
        self._round = 0
        self._has_sum = False
        self._follows = False

    def begin(self, round_number: int, num_microbatches: int, is_early: bool) -> None:
        """A training round's first action comes.

        Args:
            num_microbatches: that this replica computes of it.
            is_early: whether it ends with a sum, of which parts may be made before its end.
        """
        if round_number == self._round:
            return
        self._round = round_number
        self._forget_sum()
        self._readiness.begin(num_microbatches, is_early)

    def sum(self, round_number: int) -> None:
        """Sum the gradients after a round, and take over replica 0's buffers; waits for the others.

        Raises:
            RpcmpError: another replica has failed or is gone.
            ValueError, RuntimeError: a gradient cannot be summed.
        """
        self.begin(round_number, 0, is_early=False)
        end_buffers = self._following.begin_buffers(round_number)
        for number in self._readiness.end():
            self._summing.launch(round_number, number, computes=False)
        self._summing.finish(round_number)
        self._has_sum = True
        end_buffers()

    def unite(self) -> None:
        """Begin as what replica 0 is."""
        self._following.unite()

    def follow(self, follows: bool) -> None:
        """Whether replica 0's parameters are taken over after each step."""
        self._follows = follows

    def stepped(self, round_number: int, step: int) -> None:
        """The optimizer has stepped.

        Raises:
            RpcmpError: replica 0 is gone.
        """
        self._has_sum = False
        if self._follows:
            self._following.parameters(round_number, step)

    def abort(self, first: int, last: int, error: RpcmpError) -> None:
        """Let no replica wait for the rounds from `first` to `last`."""
        self._summing.abort(first, last, error)

    # What the other replicas ask.

    def part(self, asking: int, key: int, bucket: int) -> Future[Any]:
        """See BucketAllReduce."""
        return self._summing.part(asking, key, bucket)

    def total(self, key: int, bucket: int) -> Future[Any]:
        """See BucketAllReduce."""
        return self._summing.sum_of_chunk(key, bucket)

    def _launch(self, bucket: int) -> None:
        self._summing.launch(self._round, bucket, computes=True)

    def _forget_sum(self) -> None:
        """Gradients that add to a sum must be added once: to replica 0's."""
        if self._has_sum and self._own.replica:
            for parameter in self._summing.parameters:
                parameter.grad = None
        self._has_sum = False


class _Others:
    """The other replicas, as BucketAllReduce asks them."""

    def __init__(
        self, peers: Transport, names: list[str], own: int, part: Method, total: Method
    ) -> None:
        self._peers, self._names, self._own = peers, names, own
        self._part, self._total = part, total

    def part(self, member: int, key: int, bucket: int) -> Future[Any]:
        return self._peers.call(self._names[member], self._part, self._own, key, bucket)

    def total(self, member: int, key: int, bucket: int) -> Future[Any]:
        return self._peers.call(self._names[member], self._total, key, bucket)

    def name(self, member: int) -> str:
        return self._names[member]


class GradientSync:
    """One worker's side of it; all but the answers to others on the compute thread.

    Args:
        assignment: which worker of which job.
        model: its layers.
        peers: the other members of the group.
        part, total, posted: the methods by which another worker's are asked for.
    """

    def __init__(
        self,
        assignment: Assignment,
        model: StageModel,
        peers: Transport,
        part: Method,
        total: Method,
        posted: Method,
    ) -> None:
        self._own = own = assignment.member
        config = assignment.config

        def ask(worker: str, key: Key) -> Callable[[], list[Any]]:
            asked = peers.call(worker, posted, key)
            return lambda: result(asked, worker)

        def fetch(worker: str, key: Key) -> list[Tensor]:
            return ask(worker, key)()

        def replicas(stage: str) -> int:
            return config.turns_of(stage).num_replicas

        self._board = TensorMailbox()
        self._replication = (
            ReplicaGroup(
                own, model, peers, part, total, ReplicaBroadcast(own, model, self._board, ask)
            )
            if own.num_replicas > 1
            else None
        )
        self._ties = TiedParameters(own, model, assignment.tied, replicas, self._board, fetch)
        self._round = 0

    def begin(self, round_number: int, num_microbatches: int, is_early: bool) -> None:
        """A training round's first action comes; see ReplicaGroup."""
        if self._replication is not None:
            self._replication.begin(round_number, num_microbatches, is_early)

    def sum(self, round_number: int, step: int) -> None:
        """Have all gradients that this worker's optimizer needs; waits for the others.

        Args:
            round_number: the round after which.
            step: the optimizer step that it is for.

        Raises:
            StageError: another worker has failed, or a gradient cannot be summed.
            WorkerDiedError: another worker is gone.
        """
        self._round = round_number
        with self._named(step):
            if self._replication is not None:
                self._replication.sum(round_number)
            self._ties.sum(round_number)

    def stepped(self, step: int) -> None:
        """The optimizer has stepped.

        Raises:
            StageError: another worker has failed.
            WorkerDiedError: another worker is gone.
        """
        with self._named(step):
            if self._replication is not None:
                self._replication.stepped(self._round, step)
            self._ties.stepped(self._round, step)

    def unite(self, follows: bool) -> None:
        """Begin as what replica 0, and the owners of shared parameters, are.

        Args:
            follows: whether replica 0's parameters are taken over after each step as well.

        Raises:
            RpcmpError: another worker is gone.
        """
        self._ties.unite()
        if self._replication is not None:
            self._replication.unite()
            self._replication.follow(follows)

    def abort(self, first: int, last: int, cause: RpcmpError | None = None) -> None:
        """Let no worker wait for what belongs to the rounds from `first` to `last`.

        Args:
            cause: why, where that is known.
        """
        error = cause or JobError(f"stage {self._own.label!r}: the step was aborted")
        if self._replication is not None:
            self._replication.abort(first, last, error)
        self._board.abort(first, last, error)

    @contextlib.contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Errors say where they are from.

        What another worker has failed with says so already; of a lost one its supervisor knows
        better.
        """
        try:
            yield
        except (WorkerDiedError, StageError):
            raise
        except Exception as error:
            raise StageError(self._own.label, "sum", one_line(error), step=step) from error

    # What other workers ask.

    def part(self, asking: int, key: int, bucket: int) -> Future[Any]:
        """See BucketAllReduce."""
        return self._replicas.part(asking, key, bucket)

    def total(self, key: int, bucket: int) -> Future[Any]:
        """See BucketAllReduce."""
        return self._replicas.total(key, bucket)

    def posted(self, key: Key) -> Future[Any]:
        """See Board."""
        return self._board.get(key)

    @property
    def _replicas(self) -> ReplicaGroup:
        if self._replication is None:
            raise JobError(f"stage {self._own.label!r} has no replicas")
        return self._replication
