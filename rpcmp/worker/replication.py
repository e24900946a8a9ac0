"""What the replicas of a stage do together, so that they stay one model.

    backward of the last micro-batch ──gradients, bucket by bucket──┐
    after it   the rest of the sum, and replica 0's buffers         └─> all have the same sum
    then       each steps its own optimizer, to the same parameters

A round whose gradients only add up does none of this; the driver then asks for the sum when
somebody wants to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

from rpcmp.errors import RpcmpError
from rpcmp.members import Member, member
from rpcmp.transport import Transport
from rpcmp.worker.following import Following
from rpcmp.worker.model import StageModel
from rpcmp.worker.readiness import Readiness
from rpcmp.worker.summing import Summing

Method = Callable[..., Future[Any]]


class Replication:
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
        following: Following,
    ) -> None:
        self._own = own
        names = [member(own.stage, replica) for replica in range(own.num_replicas)]
        parameters = [value for _, value in model.named_parameters() if value.requires_grad]
        others = _Others(peers, names, own.replica, part, total)
        self._summing = Summing(parameters, own.replica, own.num_replicas, others)
        self._readiness = Readiness(
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
        """See Summing."""
        return self._summing.part(asking, key, bucket)

    def total(self, key: int, bucket: int) -> Future[Any]:
        """See Summing."""
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
    """The other replicas, as Summing asks them."""

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
