"""One rank of an exchange of gradients without training: by rpcmp, or by Gloo's all-reduce.

Nothing is computed besides. Every rank has its gradients when the clock starts, and all have the
sum when it stops; an exchange before it, which does not count, lets all start at the same time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.futures import Future

from rpcmp.errors import MismatchError
from rpcmp.process.channel import Message
from rpcmp.process.memory_access import open_memory
from rpcmp.rpc import transport, unpickler
from rpcmp.rpc.messages import Peer
from rpcmp.tools.bench.peer_trainers import join_gloo
from rpcmp.worker.bucket_allreduce import BucketAllReduce

PARAMETER_BYTES = 10**6
"""Size of each parameter but the last: several tensors, as in a model with several layers."""

ELEMENT_BYTES = 4


class Exchange(ABC):
    """Does one exchange after the other, as a peer of `rpcmp.tools.bench.contestants`.

    Args:
        job: "bytes" of all gradients, whether ranks are "apart", as on hosts of their own; "rank",
            "world_size" and "store" as in torch.
    """

    def __init__(self, job: Message) -> None:
        self._job = job
        self._rank: int = job["rank"]
        self._world_size: int = job["world_size"]

    @abstractmethod
    def build(self, way: str) -> None:
        """Join the other ranks; there is one way to do it."""

    def run(self, steps: int) -> Message:
        """Exchange `steps` times; there are no losses."""
        self._exchange()
        begin = time.monotonic_ns()
        for _ in range(steps):
            self._exchange()
        end = time.monotonic_ns()
        self._check()
        return {"begin": begin, "end": end, "losses": []}

    @abstractmethod
    def _exchange(self) -> None:
        """Exchange once, until this rank has the sum."""

    @abstractmethod
    def _check(self) -> None:
        """Check the sum.

        Raises:
            MismatchError: it is not.
        """


class AllReduce(Exchange):
    """One tensor, in place."""

    def build(self, way: str) -> None:
        join_gloo(self._job)
        self._tensor = torch.empty(self._job["bytes"] // ELEMENT_BYTES)
        self._tensor.zero_()  # a sum in place grows unless it is of zeros

    def _exchange(self) -> None:
        dist.all_reduce(self._tensor)

    def _check(self) -> None:
        ones = torch.ones(8)
        dist.all_reduce(ones)
        _require(ones, self._world_size)


class Sum(Exchange):
    """Parameters' gradients by `bucket_allreduce` of workers, over torch RPC.

    In the clock: the copies into buckets and their way out, which a job's stages hide behind the
    backward as far as they can. A rank is set up like a worker, but without a private network.
    """

    def build(self, way: str) -> None:
        rank = self._rank
        total, size = self._job["bytes"] // ELEMENT_BYTES, PARAMETER_BYTES // ELEMENT_BYTES
        sizes = [min(size, total - start) for start in range(0, total, size)]
        self._gradients = [torch.full((size,), rank + 1.0) for size in sizes]
        self._parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        names = [f"rank:{rank}" for rank in range(self._world_size)]
        peers = [cast(Peer, _Peer(name)) for name in names]
        self._summing = BucketAllReduce(self._parameters, rank, peers, lambda: RPC.memory)
        self._key = 0
        unpickler._CALLED.add((__name__, Served.__name__))
        store = FileStore(self._job["store"], self._world_size)
        find = _find_nothing if self._job["apart"] else open_memory
        transport.join(names, rank, store, Served(self._summing), find)

    def _exchange(self) -> None:
        self._key += 1
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for number in range(len(self._summing.buckets)):
            self._summing.launch(self._key, number, computes=False)
        self._summing.finish(self._key)

    def _check(self) -> None:
        for parameter in self._parameters:
            _require(parameter.grad, self._world_size * (self._world_size + 1) / 2)


RPC = transport.Transport()


def _find_nothing(address: str) -> None:
    """Find no memory of another rank, as if it were on another host."""


class Served:
    """The RPC service of a rank: the part of a stage's that the exchange needs."""

    def __init__(self, summing: BucketAllReduce) -> None:
        self._summing = summing

    def part(self, asking: int, key: int, bucket: int, shares_memory: bool) -> Future[Any]:
        """See BucketAllReduce."""
        return self._summing.part(asking, key, bucket, shares_memory)

    def total(self, key: int, bucket: int, shares_memory: bool) -> Future[Any]:
        """See BucketAllReduce."""
        return self._summing.chunk_total(key, bucket, shares_memory)


class _Peer:
    """Another rank, by torch RPC."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gradient_part(self, rank: int, round_number: int, bucket: int) -> Future[Any]:
        shares_memory = RPC.shares_memory(self.name)
        return RPC.call(self.name, Served.part, rank, round_number, bucket, shares_memory)

    def gradient_total(self, round_number: int, bucket: int) -> Future[Any]:
        shares_memory = RPC.shares_memory(self.name)
        return RPC.call(self.name, Served.total, round_number, bucket, shares_memory)


def _require(found: torch.Tensor | None, value: float) -> None:
    if found is None or not bool((found == value).all()):
        raise MismatchError(f"the sum should be {value} everywhere, but it is {found}")
