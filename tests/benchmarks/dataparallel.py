"""One rank of torch's DistributedDataParallel over Gloo.

It runs at its best: mini-batches are loaded before the clock starts, gradients are sent only with a
rank's last micro-batch (`no_sync`) and lie in DDP's buckets from the start, and the loss is divided
by the number of micro-batches instead of every gradient.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rpcmp.config import loader
from rpcmp.process.channel import Message
from rpcmp.tools.bench import peer_trainers


class DataParallel:
    """Trains the model and micro-batches of the job's replicas.

    Args:
        job: "config", the job as plain data, "folder" of its Python files; "rank", "world_size"
            and "store" as in torch. All ranks must have equally many equal micro-batches.
    """

    def __init__(self, job: Message) -> None:
        sys.path.insert(0, job["folder"])
        self._job = job
        self._rank: int = job["rank"]
        self._world_size: int = job["world_size"]

    def build(self, way: str) -> None:
        """Build the model; there is one way to train it."""
        config = loader.parse_config(self._job["config"])
        self._count = config.num_microbatches
        peer_trainers.join_gloo(self._job)
        (names,) = peer_trainers.layer_names(config)
        self._part = peer_trainers.build(config, 0, names)
        self._model = DistributedDataParallel(self._part.module, gradient_as_bucket_view=True)
        self._loss = peer_trainers.slice_loss(config, self._count // self._world_size)
        self._batches = peer_trainers.endless_batches(config)

    def run(self, steps: int) -> Message:
        """Train the next `steps` mini-batches."""
        batches = [next(self._batches) for _ in range(steps)]
        dist.barrier()
        begin = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        return {"begin": begin, "end": time.monotonic_ns(), "losses": losses}

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        slices = list(zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True))
        *first, last = slices[self._rank :: self._world_size]
        with self._model.no_sync():
            loss = sum(self._slice(x, y) for x, y in first)
        loss += self._slice(*last)
        self._part.step()
        return loss / self._world_size

    def _slice(self, x: Tensor, y: Tensor) -> float:
        loss = self._loss(self._model(x), y)
        loss.backward()
        return loss.item()
