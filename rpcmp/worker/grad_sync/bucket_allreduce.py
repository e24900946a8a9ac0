"""The sum of gradients over workers that have the same parameters, over the stages' own RPC.

    member 0   [a0 | b0] ──b0──> member 1      every member sums one chunk of each bucket,
    member 1   [a1 | b1] ──a1──> member 0      in the order of the members (reduce-scatter),
    both       [a0+a1 | b0+b1]                 and gets the others' chunks (all-gather)

Two members have it shorter: each gets all of the other's gradients and adds its own. That is as
many bytes, half as many messages, and the same sum, for of two numbers the order does not matter.

Members ask for what they need and are answered when it is there, as everywhere in rpcmp. A bucket
is on its way as soon as the last micro-batch has given all of its gradients, while the backward
goes on. Every element is summed once, in one order, and sent to all: members cannot differ.

While the compute thread computes, copies and sums are made on a thread of their own; RPC threads
must not be held up by them either.

Gradients as a few flat tensors, so that a sum of many small ones takes few messages.

    parameters    w0 b0 w1 b1 w2 b2          last first, as their gradients are ready
    buckets       [b2 w2] [b1 w1] [b0 w0]    about BUCKET_BYTES each, of one dtype
    chunks        ██ ██                      of each bucket one a member, who sums it

A parameter without a gradient has room in its bucket, and a mark that there is none: an optimizer
treats None and zeros differently.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Waiting
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.futures import Future

from rpcmp.errors import JobError, RpcmpError, from_wire, one_line, to_wire
from rpcmp.rpc import transport
from rpcmp.rpc.messages import GradientPart
from rpcmp.rpc.transport import Raised

BUCKET_BYTES = 25 * 2**20
"""As under DistributedDataParallel. With 8 MiB a sum of 50 MB takes 20 to 30 % longer, by the cost
of its messages."""

WHOLE_BYTES = 256 * 2**10
"""A bucket up to this size is summed by one member: chunks would cost more messages than time."""


@dataclass(frozen=True)
class Bucket:
    """Some parameters of one dtype.

    Attributes:
        indices: of the parameters, in the order in which they lie in the bucket.
        sizes: elements of each.
        dtype: of all.
    """

    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return sum(self.sizes)

    def flat(self, gradients: Sequence[Tensor | None]) -> GradientPart:
        """Its gradients as one contiguous host tensor, zeros where there is none.

        Args:
            gradients: of its parameters, in its order.

        Raises:
            ValueError: one is sparse.
        """
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError(
                "sparse gradients cannot be summed over workers; make the layer with sparse=False"
            )
        flat = [
            torch.zeros(size, dtype=self.dtype)
            if gradient is None
            else gradient.detach().reshape(-1).cpu()
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        return GradientPart(torch.cat(flat), tuple(gradient is not None for gradient in gradients))

    def unpack(self, part: GradientPart, parameters: Sequence[nn.Parameter]) -> None:
        """Make its gradients those of the parameters, as views where that is all the same."""
        for index, (start, end), is_there in zip(self.indices, self.spans(), part.has, strict=True):
            parameter = parameters[index]
            view = part.values[start:end].view(parameter.shape)
            if not is_there:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_contiguous():
                parameter.grad = view.to(parameter.device)
            else:  # its strides decide the order in which a norm is summed
                parameter.grad.copy_(view)

    def spans(self) -> list[tuple[int, int]]:
        """Where each parameter lies: from which element to which."""
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return list(itertools.pairwise(ends))


def chunks(bucket: Bucket, num_members: int, number: int) -> list[tuple[int, int]]:
    """From which element to which each member sums a bucket.

    A small one is summed by one member alone; of two, each sums everything.

    Args:
        bucket: which.
        num_members: of those that sum.
        number: of the bucket, so that small ones take turns.
    """
    size = bucket.num_elements
    if num_members == 2:
        return [(0, size)] * 2
    if size * bucket.dtype.itemsize <= WHOLE_BYTES:
        return [(0, size if member == number % num_members else 0) for member in range(num_members)]
    bounds = [size * member // num_members for member in range(num_members + 1)]
    return list(itertools.pairwise(bounds))


def pack(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """The buckets of some parameters, the last parameter first."""
    found: list[Bucket] = []
    open_: dict[torch.dtype, list[int]] = {}

    def close(dtype: torch.dtype) -> None:
        indices = tuple(open_.pop(dtype))
        found.append(Bucket(indices, tuple(parameters[i].numel() for i in indices), dtype))

    for index in reversed(range(len(parameters))):
        dtype = parameters[index].dtype
        mine = open_.setdefault(dtype, [])
        mine.append(index)
        if sum(parameters[i].numel() for i in mine) * dtype.itemsize >= BUCKET_BYTES:
            close(dtype)
    for dtype in list(open_):
        close(dtype)
    return found


def add(parts: Sequence[GradientPart], bucket: Bucket, start: int) -> GradientPart:
    """The sum of the members' parts of one chunk, in their order; overwrites the first one.

    What a member has no gradient of is left out, not added as zeros: minus zero plus zero is zero.

    Args:
        parts: one a member.
        bucket: of which.
        start: the chunk's first element in it.
    """
    total, have = parts[0]
    for part, has in parts[1:]:
        if all(has) and all(have):
            total += part
        else:
            for (first, last), mine, theirs in zip(bucket.spans(), have, has, strict=True):
                at = slice(max(first - start, 0), max(last - start, 0))
                if theirs and mine:
                    total[at] += part[at]
                elif theirs:
                    total[at] = part[at]
        have = tuple(one or other for one, other in zip(have, has, strict=True))
    return GradientPart(total, have)


class Others(Protocol):
    """How a member reaches the others."""

    def part(self, member: int, key: int, bucket: int) -> Future[Any]:
        """A member's part of the chunk that the asking one sums."""

    def total(self, member: int, key: int, bucket: int) -> Future[Any]:
        """The sum of the chunk that a member sums."""

    def name(self, member: int) -> str:
        """What a member is called."""


class BucketReduction:
    """One bucket of one sum, as far as it has come.

    Attributes:
        mine: this member's own gradients, flat.
        total: the sum of the chunk that this member sums.
        done: the sum of the whole bucket.
        left: what `done` waits for: the own chunk, and all others'; not counted between two.
        owed: how often somebody has still to get something from here, this worker included.
    """

    def __init__(self, left: int, owed: int) -> None:
        self.mine: Waiting[GradientPart] = Waiting()
        self.total: Waiting[GradientPart] = Waiting()
        self.done: Waiting[GradientPart] = Waiting()
        self.left = left
        self.owed = owed

    def fail(self, error: Exception) -> None:
        """Let nobody wait for what will not come."""
        for promise in (self.mine, self.total, self.done):
            if not promise.done():
                promise.set_exception(error)


class BucketAllReduce:
    """One worker's side of the sums of one group of members.

    Sums are numbered, and every member takes part in all of them in the same order.

    Args:
        parameters: those that the members share, in the same order at each.
        rank: of this member.
        num_members: how many there are; at least two.
        others: how to reach them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], rank: int, num_members: int, others: Others
    ) -> None:
        self.parameters = list(parameters)
        self.rank = rank
        self._is_pair = num_members == 2
        self._others = others
        self._members = [member for member in range(num_members) if member != rank]
        self.buckets = pack(self.parameters)
        self._chunks = [
            chunks(bucket, num_members, number) for number, bucket in enumerate(self.buckets)
        ]
        self._lock = threading.Lock()
        self._sums: dict[int, list[BucketReduction]] = {}
        self._over = 0
        self._aborted: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "rpcmp-sum")

    # What this worker does.

    def launch(self, key: int, number: int, computes: bool) -> None:
        """Begin to sum a bucket, whose gradients are final; does not wait.

        Args:
            computes: whether this thread has more to compute. One that will only wait packs the
                bucket itself: a hop to another thread takes half a millisecond on busy cores.
        """
        gradients = [self.parameters[index].grad for index in self.buckets[number].indices]

        def pack() -> None:
            self._pack(key, number, self.buckets[number].flat(gradients))

        if computes:
            self._later(key, number, pack)
        else:
            self._guarded(key, number, pack)

    def finish(self, key: int) -> None:
        """Wait for all buckets, which must have been launched; the sums are the gradients then.

        Raises:
            RpcmpError: a member has failed or is gone.
            ValueError: a gradient cannot be summed.
        """
        if not self.buckets:
            return
        for bucket, found in zip(self.buckets, self._of(key), strict=True):
            bucket.unpack(found.done.result(), self.parameters)
            self._note_served(key, found)

    def abort(self, first: int, last: int, error: RpcmpError) -> None:
        """Give up the sums from `first` to `last`: nobody waits for them any more."""
        with self._lock:
            self._aborted.update(range(first, last + 1))
            gone = [self._sums.pop(key) for key in list(self._sums) if first <= key <= last]
        for found in (found for of_sum in gone for found in of_sum):
            found.fail(error)

    # What the other members ask.

    def part(self, asking: int, key: int, number: int) -> Future[Any]:
        """The part of the chunk that another member sums."""
        start, end = self._chunks[number][asking]

        def answer(mine: GradientPart) -> GradientPart:
            return GradientPart(mine.values[start:end], mine.has)

        return self._answer(key, number, lambda found: found.mine, answer)

    def sum_of_chunk(self, key: int, number: int) -> Future[Any]:
        """The sum of the chunk that this member sums."""
        return self._answer(key, number, lambda found: found.total, lambda total: total)

    # How a sum goes on, mostly on the own thread.

    def _pack(self, key: int, number: int, mine: GradientPart) -> None:
        found = self._of(key)[number]
        found.mine.set_result(mine)
        if self._owns(self.rank, number):
            asked = [
                (self._others.name(m), self._others.part(m, key, number)) for m in self._members
            ]
            self._when_all(key, number, asked, self._sum)
        owners = [member for member in self._members if self._owns(member, number)]
        if owners and not self._is_pair:
            asked = [(self._others.name(m), self._others.total(m, key, number)) for m in owners]
            self._when_all(key, number, asked, functools.partial(self._gather, owners))

    def _sum(self, key: int, number: int, others: list[GradientPart]) -> None:
        """All parts of the own chunk are there."""
        found, (start, end) = self._of(key)[number], self._chunks[number][self.rank]
        mine = found.mine.result()
        if self._is_pair:
            found.done.set_result(add([*others, mine], self.buckets[number], start))
            return
        # A copy: the sum is still being sent when an optimizer may already change the gradients.
        parts = [*others[: self.rank], GradientPart(mine.values[start:end].clone(), mine.has)]
        parts += others[self.rank :]
        total = add(parts, self.buckets[number], start)
        mine.values[start:end] = total.values
        found.total.set_result(total)
        self._one_has_come(found, total)

    def _gather(self, owners: list[int], key: int, number: int, totals: list[GradientPart]) -> None:
        """All chunks that others sum are there. Their owners have had our parts of them."""
        found = self._of(key)[number]
        values = found.mine.result().values
        for owner, total in zip(owners, totals, strict=True):
            start, end = self._chunks[number][owner]
            values[start:end] = total.values
        self._one_has_come(found, totals[0])

    @staticmethod
    def _one_has_come(found: BucketReduction, total: GradientPart) -> None:
        found.left -= 1
        if not found.left:
            found.done.set_result(GradientPart(found.mine.result().values, total.has))

    def _when_all(
        self,
        key: int,
        number: int,
        asked: list[tuple[str, Future[Any]]],
        then: Callable[[int, int, list[GradientPart]], None],
    ) -> None:
        def arrived(answers: list[Any]) -> None:
            def go_on() -> None:
                for answer in answers:
                    if isinstance(answer, Raised):
                        raise from_wire(answer.error)
                then(key, number, answers)

            self._later(key, number, go_on)

        transport.when_all(asked, arrived)

    def _later(self, key: int, number: int, work: Callable[[], None]) -> None:
        self._thread.submit(self._guarded, key, number, work)

    def _guarded(self, key: int, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._of(key)[number].fail(error)

    def _answer(
        self,
        key: int,
        number: int,
        wanted: Callable[[BucketReduction], Waiting[GradientPart]],
        answer: Callable[[GradientPart], GradientPart],
    ) -> Future[Any]:
        future: Future[Any] = Future()

        def there(promise: Waiting[GradientPart]) -> None:
            error = promise.exception()
            if error is None:
                future.set_result(answer(promise.result()))
            else:
                known = error if isinstance(error, RpcmpError) else JobError(one_line(error))
                future.set_result(Raised(to_wire(known)))
            self._note_served(key, found)

        found = self._of(key)[number]
        wanted(found).add_done_callback(there)
        return future

    def _owns(self, member: int, number: int) -> bool:
        start, end = self._chunks[number][member]
        return end > start

    def _of(self, key: int) -> list[BucketReduction]:
        """The buckets of a sum; of one that was given up, such as have failed."""
        with self._lock:
            found = self._sums.get(key)
            if found is None:
                found = [self._begun(number) for number in range(len(self.buckets))]
                if key > self._over and key not in self._aborted:
                    self._sums[key] = found
                    return found
                for one in found:
                    one.fail(JobError(f"the step of round {key} was aborted"))
        return found

    def _begun(self, number: int) -> BucketReduction:
        is_mine = self._owns(self.rank, number)
        owners = sum(self._owns(member, number) for member in self._members)
        totals = len(self._members) if is_mine and not self._is_pair else 0
        return BucketReduction(left=is_mine + bool(owners), owed=owners + totals + 1)

    def _note_served(self, key: int, served: BucketReduction) -> None:
        """Somebody has had something; let go of a sum that everybody has."""
        with self._lock:
            served.owed -= 1
            if not any(one.owed for one in self._sums.get(key, ())):
                self._sums.pop(key, None)
                self._over = max(self._over, key)
