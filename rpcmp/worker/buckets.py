"""Gradients as a few flat tensors, so that the sum of many small ones takes few messages.

    parameters    w0 b0 w1 b1 w2 b2          last first, as their gradients become final
    buckets       [b2 w2] [b1 w1] [b0 w0]    about BUCKET_BYTES each, of one dtype
    chunks        ██ ██                      one per bucket and member, which sums it

A parameter without a gradient has room in its bucket, and a mark that it has none: an optimizer
treats None and zeros differently.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rpcmp.rpc.messages import GradientPart
from rpcmp.rpc.shared_memory import OwnMemory
from rpcmp.worker.weight_grad import AccumulateGradHook

BUCKET_BYTES = 25 * 2**20
"""As under DistributedDataParallel. With 8 MiB a sum of 50 MB takes 20 to 30 % longer, by the cost
of its messages."""

WHOLE_BYTES = 256 * 2**10
"""A bucket up to this size is summed by one member: chunks would cost more messages than time."""


@dataclass(frozen=True)
class Bucket:
    """Some parameters of one dtype."""

    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    def flatten(
        self, gradients: Sequence[Tensor | None], memory: OwnMemory | None = None
    ) -> GradientPart:
        """Return its gradients as one contiguous host tensor, with zeros for None.

        Args:
            memory: where it lies, if others are to have it without a copy.
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
        has = tuple(gradient is not None for gradient in gradients)
        if memory is None:
            return GradientPart(torch.cat(flat), has)
        shared = memory.allocate((self.num_elements,), self.dtype)
        return GradientPart(torch.cat(flat, out=shared.tensor), has, shared)

    def unflatten(self, part: GradientPart, parameters: Sequence[nn.Parameter]) -> None:
        """Assign the bucket's gradients to the parameters' `.grad`, as views if strides allow."""
        flat = part.values.split(self.sizes)
        for index, values, has in zip(self.indices, flat, part.has, strict=True):
            parameter = parameters[index]
            view = values.view(parameter.shape)
            if not has:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_contiguous():
                parameter.grad = view.to(parameter.device)
            else:  # its strides decide the order in which a norm is summed
                parameter.grad.copy_(view)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last element (exclusive) of each parameter."""
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return list(itertools.pairwise(ends))


def pack(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Distribute parameters over buckets, the last parameter first."""
    buckets: list[Bucket] = []
    open_: dict[torch.dtype, list[int]] = {}

    def close(dtype: torch.dtype) -> None:
        indices = tuple(open_.pop(dtype))
        buckets.append(Bucket(indices, tuple(parameters[i].numel() for i in indices), dtype))

    for index in reversed(range(len(parameters))):
        dtype = parameters[index].dtype
        indices = open_.setdefault(dtype, [])
        indices.append(index)
        if sum(parameters[i].numel() for i in indices) * dtype.itemsize >= BUCKET_BYTES:
            close(dtype)
    for dtype in list(open_):
        close(dtype)
    return buckets


def chunks(bucket: Bucket, num_members: int, number: int) -> list[tuple[int, int] | None]:
    """Return the elements of a bucket that each member sums, as (first, last exclusive), or None.

    A small bucket, which may be empty, is summed by one member. Of two members, each sums all.

    Args:
        number: of the bucket; small buckets go to the members in turn.
    """
    size = bucket.num_elements
    members = range(num_members)
    if num_members == 2:
        return [(0, size)] * 2
    if not size or size * bucket.dtype.itemsize <= WHOLE_BYTES:
        return [(0, size) if member == number % num_members else None for member in members]
    bounds = itertools.pairwise(size * member // num_members for member in range(num_members + 1))
    return [(first, last) if first < last else None for first, last in bounds]


def add(
    parts: Sequence[GradientPart], bucket: Bucket, start: int, memory: OwnMemory | None = None
) -> GradientPart:
    """Return the sum of the members' parts of one chunk, in their order.

    Missing gradients are left out, not added as zeros: minus zero plus zero is zero.

    Args:
        memory: where the sum lies, if others are to have it without a copy.
    """
    (one, total_has, _), *rest = parts
    shared = None if memory is None else memory.allocate(tuple(one.shape), one.dtype)
    total = torch.empty_like(one) if shared is None else shared.tensor
    if all(total_has) and all(rest[0].has):  # by far the most frequent, and one pass less
        torch.add(one, rest.pop(0).values, out=total)
    else:
        total.copy_(one)
    for values, has, _ in rest:
        if all(has) and all(total_has):
            total += values
        else:
            for (first, last), in_total, in_part in zip(
                bucket.spans(), total_has, has, strict=True
            ):
                span = slice(max(first - start, 0), max(last - start, 0))
                if in_part and in_total:
                    total[span] += values[span]
                elif in_part:
                    total[span] = values[span]
        total_has = tuple(one or other for one, other in zip(total_has, has, strict=True))
    return GradientPart(total, total_has, shared)


class GradientReadyTracker:
    """Finds the buckets whose gradients are final before the round is over; on the compute thread.

    A hook is called when something has been added to a gradient, but cannot know whether that was
    the last time. The number of additions per micro-batch is learned from the round before: a
    parameter is ready once all micro-batches have added to it that often. If a model skips layers
    at times, no bucket is ready early, and nothing is wrong.

    Args:
        on_ready: called with the number of a bucket once all of its gradients are final.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        on_ready: Callable[[int], None],
    ) -> None:
        self._buckets = buckets
        self._on_ready = on_ready
        self._bucket_of = {index: n for n, bucket in enumerate(buckets) for index in bucket}
        self._per_microbatch: dict[int, int] = {}
        self._counts = [0] * len(parameters)
        self._expected = [0] * len(parameters)
        self._missing: list[int] = []
        self._num_microbatches = 0
        self._is_early = False
        self._ready: set[int] = set()
        self._hooks = [
            AccumulateGradHook(parameter, functools.partial(self._count_addition, index))
            for index, parameter in enumerate(parameters)
        ]

    def start_round(self, num_microbatches: int, is_early: bool) -> None:
        """Start counting; `is_early`: whether to call `on_ready` before the end of the round."""
        self._num_microbatches, self._is_early = num_microbatches, is_early
        for hook in self._hooks:
            hook.reset()
        self._counts = [0] * len(self._counts)
        self._expected = [
            num_microbatches * self._per_microbatch.get(index, 0)
            for index in range(len(self._counts))
        ]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._ready = set()

    def finish_round(self) -> list[int]:
        """Return the buckets that were not ready before; now all gradients are final."""
        for index, (count, expected) in enumerate(zip(self._counts, self._expected, strict=True)):
            if self._bucket_of[index] in self._ready and count != expected:
                raise RuntimeError(
                    "a parameter got more gradients than in the step before, when they had been "
                    "summed already; checkpoints with use_reentrant=True do so: take "
                    "recompute = true, or use_reentrant=False"
                )
        if self._num_microbatches:
            self._per_microbatch = {
                index: count // self._num_microbatches
                for index, count in enumerate(self._counts)
                if count and count % self._num_microbatches == 0
            }
        return [number for number in range(len(self._buckets)) if number not in self._ready]

    def _count_addition(self, index: int) -> None:
        self._counts[index] += 1
        if self._is_early and self._counts[index] == self._expected[index]:
            bucket = self._bucket_of[index]
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._ready.add(bucket)
                self._on_ready(bucket)
