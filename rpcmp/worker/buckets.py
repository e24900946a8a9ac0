"""Gradients as a few flat tensors, so that a sum of many small ones takes few messages.

    parameters    w0 b0 w1 b1 w2 b2          last first, as their gradients are ready
    buckets       [b2 w2] [b1 w1] [b0 w0]    about BUCKET_BYTES each, of one dtype
    chunks        ██ ██                      of each bucket one a member, who sums it

A parameter without a gradient has room in its bucket, and a mark that there is none: an optimizer
treats None and zeros differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rpcmp.work import Part

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

    def flat(self, gradients: Sequence[Tensor | None]) -> Part:
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
        return Part(torch.cat(flat), tuple(gradient is not None for gradient in gradients))

    def unpack(self, part: Part, parameters: Sequence[nn.Parameter]) -> None:
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


def add(parts: Sequence[Part], bucket: Bucket, start: int) -> Part:
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
    return Part(total, have)
