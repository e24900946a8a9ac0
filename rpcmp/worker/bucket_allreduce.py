"""The sum of gradients over workers that have the same parameters, over the stages' own RPC.

    member 0   [a0 | b0] ──b0──> member 1      every member sums one chunk of each bucket,
    member 1   [a1 | b1] ──a1──> member 0      in the order of the members (reduce-scatter),
    both       [a0+a1 | b0+b1]                 and gets the others' chunks (all-gather)

Two members do with less: each gets all gradients of the other and adds its own. That is as many
bytes, half as many messages, and the same sum, because the order of two addends does not matter.

Members request what they need when their round starts, and are answered once it is there. A bucket
is on its way as soon as the last micro-batch has added to all of its gradients, while the backward
goes on. Every element is summed once, in one order, and sent to all: members cannot differ.

While the compute thread computes, copies and sums run on a thread of their own, and on the compute
thread when that waits for them; they must not hold up RPC threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Waiting
from concurrent.futures import InvalidStateError
from typing import Any

from torch import nn
from torch.futures import Future

from rpcmp.errors import JobError, RpcmpError, from_wire, one_line, to_wire
from rpcmp.rpc import transport
from rpcmp.rpc.messages import GradientPart, Peer
from rpcmp.rpc.shared_memory import OwnMemory
from rpcmp.rpc.transport import Raised
from rpcmp.worker import buckets
from rpcmp.worker.work_queue import WorkQueue


class BucketReduction:
    """Progress of one bucket of one sum.

    Attributes:
        chunk: the sum of the chunk that this member sums.
        total: the sum of the whole bucket.
        missing: what `total` waits for: the own chunk, and all others; unused between two members.
        unread: how many reads are to come, by other members and by this one.
        is_requested: whether the others have been asked for what this member needs.
    """

    def __init__(self, round_number: int, number: int, missing: int, unread: int) -> None:
        self.round_number = round_number
        self.number = number
        self.own: Waiting[GradientPart] = Waiting()
        self.chunk: Waiting[GradientPart] = Waiting()
        self.total: Waiting[GradientPart] = Waiting()
        self.missing = missing
        self.unread = unread
        self.is_requested = False
        self._lock = threading.Lock()

    def fail(self, error: Exception) -> None:
        # Work that is under way may fail as `own` does, and must not give `total` another error.
        for waiting in (self.total, self.chunk, self.own):
            with contextlib.suppress(InvalidStateError):  # it has ended before
                waiting.set_exception(error)

    def forget(self) -> None:
        """Drop all gradients once all have read them, and not when garbage is collected.

        Futures keep their callbacks, which refer to this object. Memory that others have a view of
        would stay in use meanwhile, and new memory would take its place.
        """
        self.own, self.chunk, self.total = Waiting(), Waiting(), Waiting()

    def add_chunk(self, chunk: GradientPart) -> None:
        """Called when one more chunk has been written to `own`."""
        with self._lock:
            self.missing -= 1
            is_complete = not self.missing
        if is_complete:
            self.total.set_result(GradientPart(self.own.result().values, chunk.has))


class BucketAllReduce:
    """One worker's side of the sums over one group of members.

    Every round has at most one sum, and every member takes part in all of them in the same order.

    Args:
        parameters: those that the members share, in the same order at each.
        members: by rank; of this member's own only the place counts.
        memory_of: returns the memory that this process shares with others, once it has any.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rank: int,
        members: Sequence[Peer],
        memory_of: Callable[[], OwnMemory | None] = lambda: None,
    ) -> None:
        self._memory_of = memory_of
        self.parameters = list(parameters)
        self.rank = rank
        self._is_pair = len(members) == 2
        self._members = members
        self._others = [member for member in range(len(members)) if member != rank]
        self.buckets = buckets.pack(self.parameters)
        self._chunks = [
            buckets.chunks(bucket, len(members), number)
            for number, bucket in enumerate(self.buckets)
        ]
        self._lock = threading.Lock()
        self._sums: dict[int, list[BucketReduction]] = {}
        self._last_complete = 0
        self._aborted: set[int] = set()
        self._work = WorkQueue("rpcmp-sum")

    # This worker's own calls.

    def expect(self, round_number: int) -> None:
        """Ask the others for all that this member will need of a sum, before anyone has it.

        So the last member to be ready does not have to wait for a request's way there and back.
        """
        if not self.buckets:
            return  # a sum of nothing ends by itself, and would be kept for ever
        for reduction in self._reductions(round_number):
            self._attempt(reduction, functools.partial(self._request, reduction))

    def launch(self, round_number: int, number: int, computes: bool) -> None:
        """Start to sum a bucket, whose gradients are final; does not wait.

        Args:
            computes: whether this thread goes on computing. If it would only wait, it packs the
                bucket itself: a hop to another thread takes half a millisecond on busy cores.
        """
        reduction = self._reductions(round_number)[number]
        bucket = self.buckets[number]
        gradients = [self.parameters[index].grad for index in bucket.indices]

        def pack() -> None:
            reduction.own.set_result(bucket.flatten(gradients, self._memory_of()))

        self._attempt(reduction, functools.partial(self._request, reduction))
        if computes:
            self._work.submit(functools.partial(self._attempt, reduction, pack))
        else:
            self._attempt(reduction, pack)

    def finish(self, round_number: int) -> None:
        """Wait for all buckets, which must have been launched, and assign the sums to `.grad`."""
        if not self.buckets:
            return
        with self._work.helped():
            for bucket, reduction in zip(self.buckets, self._reductions(round_number), strict=True):
                self._work.work_until(reduction.total)
                bucket.unflatten(reduction.total.result(), self.parameters)
                self._mark_read(reduction)

    def abort(self, first: int, last: int, error: RpcmpError) -> None:
        """Fail the sums of the rounds from `first` to `last` at all that wait for them."""
        with self._lock:
            self._aborted.update(range(first, last + 1))
            dropped = [self._sums.pop(key) for key in list(self._sums) if first <= key <= last]
        for reduction in (reduction for reductions in dropped for reduction in reductions):
            reduction.fail(error)

    # Requests of the other members.

    def part(
        self, rank: int, round_number: int, number: int, shares_memory: bool = False
    ) -> Future[Any]:
        """Return a future of this member's part of the chunk that `rank` sums."""
        elements = self._chunk_of(rank, number)

        def chunk(own: GradientPart) -> GradientPart:
            return own.lend(elements) if shares_memory else own.sent(elements)

        reduction = self._reductions(round_number)[number]
        return self._answer(reduction, reduction.own, chunk)

    def chunk_total(
        self, round_number: int, number: int, shares_memory: bool = False
    ) -> Future[Any]:
        """Return a future of the sum of the chunk that this member sums."""

        def whole(chunk: GradientPart) -> GradientPart:
            return chunk.lend() if shares_memory else chunk.sent()

        reduction = self._reductions(round_number)[number]
        return self._answer(reduction, reduction.chunk, whole)

    # The course of a sum.

    def _request(self, reduction: BucketReduction) -> None:
        """Request what this member needs of the others, unless that is done or of no use."""
        if reduction.is_requested or reduction.total.done():
            return
        reduction.is_requested = True
        round_number, number = reduction.round_number, reduction.number
        if self._sums_chunk(self.rank, number):
            peers = [self._members[rank] for rank in self._others]
            parts = [(p.name, p.gradient_part(self.rank, round_number, number)) for p in peers]
            self._when_all(reduction, parts, self._sum_chunk)
        ranks = [rank for rank in self._others if self._sums_chunk(rank, number)]
        if ranks and not self._is_pair:
            peers = [self._members[rank] for rank in ranks]
            totals = [(p.name, p.gradient_total(round_number, number)) for p in peers]
            self._when_all(reduction, totals, functools.partial(self._gather, ranks))

    def _sum_chunk(self, reduction: BucketReduction, others: list[GradientPart]) -> None:
        """Called with the other members' parts of the own chunk, when this member's are there."""
        bucket = self.buckets[reduction.number]
        elements = self._chunk_of(self.rank, reduction.number)
        own = reduction.own.result()
        if self._is_pair:
            reduction.total.set_result(buckets.add([*others, own], bucket, elements.start))
            return
        # The sum is not in `own`: it is still being read when an optimizer may already change that.
        parts = [*others[: self.rank], own.sent(elements), *others[self.rank :]]
        chunk = buckets.add(parts, bucket, elements.start, self._memory_of())
        own.values[elements] = chunk.values
        reduction.chunk.set_result(chunk)
        reduction.add_chunk(chunk)

    def _gather(
        self, ranks: list[int], reduction: BucketReduction, chunks: list[GradientPart]
    ) -> None:
        """Called with the chunks that the others sum. They have had this member's parts then."""
        values = reduction.own.result().values
        for rank, chunk in zip(ranks, chunks, strict=True):
            values[self._chunk_of(rank, reduction.number)] = chunk.values
        reduction.add_chunk(chunks[0])

    def _when_all(
        self,
        reduction: BucketReduction,
        requests: list[tuple[str, Future[Any]]],
        then: Callable[[BucketReduction, list[GradientPart]], None],
    ) -> None:
        def arrived(answers: list[Any]) -> None:
            def resume() -> None:
                for answer in answers:
                    if isinstance(answer, Raised):
                        raise from_wire(answer.error)
                then(reduction, [answer.opened() for answer in answers])

            work = functools.partial(self._attempt, reduction, resume)
            reduction.own.add_done_callback(lambda _: self._work.submit(work))

        transport.when_all(requests, arrived)

    def _attempt(self, reduction: BucketReduction, work: Callable[[], None]) -> None:
        try:
            work()
        except InvalidStateError:  # it has failed meanwhile, for a reason that all have got
            return
        except Exception as error:
            reduction.fail(error)

    def _answer(
        self,
        reduction: BucketReduction,
        waiting: Waiting[GradientPart],
        convert: Callable[[GradientPart], GradientPart],
    ) -> Future[Any]:
        future: Future[Any] = Future()

        def done(ended: Waiting[GradientPart]) -> None:
            error = ended.exception()
            if error is None:
                future.set_result(convert(ended.result()))
            else:
                known = error if isinstance(error, RpcmpError) else JobError(one_line(error))
                future.set_result(Raised(to_wire(known)))
            self._mark_read(reduction)

        waiting.add_done_callback(done)
        return future

    def _sums_chunk(self, rank: int, number: int) -> bool:
        return self._chunks[number][rank] is not None

    def _chunk_of(self, rank: int, number: int) -> slice:
        """Return the elements that a member sums."""
        chunk = self._chunks[number][rank]
        if chunk is None:
            raise ValueError(f"rank {rank} sums nothing of bucket {number}")
        return slice(*chunk)

    def _reductions(self, round_number: int) -> list[BucketReduction]:
        """Return the buckets of a sum; failed ones, if it was aborted."""
        with self._lock:
            reductions = self._sums.get(round_number)
            if reductions is None:
                reductions = [
                    self._new_reduction(round_number, number) for number in range(len(self.buckets))
                ]
                if round_number > self._last_complete and round_number not in self._aborted:
                    self._sums[round_number] = reductions
                    return reductions
                for reduction in reductions:
                    reduction.fail(JobError(f"the step of round {round_number} was aborted"))
        return reductions

    def _new_reduction(self, round_number: int, number: int) -> BucketReduction:
        sums_chunk = self._sums_chunk(self.rank, number)
        owners = sum(self._sums_chunk(rank, number) for rank in self._others)
        totals = len(self._others) if sums_chunk and not self._is_pair else 0
        missing, unread = sums_chunk + bool(owners), owners + totals + 1
        return BucketReduction(round_number, number, missing, unread)

    def _mark_read(self, reduction: BucketReduction) -> None:
        """Count one read; forget a sum that all have read."""
        round_number = reduction.round_number
        with self._lock:
            reduction.unread -= 1
            if not any(one.unread for one in self._sums.get(round_number, ())):
                for one in self._sums.pop(round_number, ()):
                    one.forget()
                self._last_complete = max(self._last_complete, round_number)
