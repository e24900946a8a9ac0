"""What tests.benchmarks.gpu compares rpcmp with, each in processes of its own.

Mini-batches are loaded before the clock starts and lie in the host's memory, as rpcmp's do; the
clock stops when the devices have finished. The job's "devices" has one name for each stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rpcmp.config import loader
from rpcmp.errors import UnsupportedJobError
from rpcmp.pipelining import devices
from rpcmp.process.channel import Message
from rpcmp.tools.bench import peer_trainers


def images(samples: int, classes: int, size: int) -> TensorDataset:
    """Return noise `(samples, 3, size, size)` and classes; made once, so that loading is cheap."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 3, size, size, generator=generator)
    return TensorDataset(pixels, torch.randint(classes, (samples,), generator=generator))


class Trainer:
    """Trains the job's model; subclasses place it and compute one step."""

    def __init__(self, job: Message) -> None:
        self.config = loader.parse_config(job["config"])
        self.devices = [torch.device(name) for name in job["devices"]]
        self.parts: list[peer_trainers.ModelPart] = []
        self._batches = peer_trainers.endless_batches(self.config)

    def build(self, way: str) -> None:
        """Build the model on its devices; there is one way."""
        self.parts = peer_trainers.build_stages(self.config)
        for part, device in zip(self.parts, self.devices, strict=True):
            part.module.to(device)
        self.loss = peer_trainers.slice_loss(self.config, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute one stage after the other."""
        for part, device in zip(self.parts, self.devices, strict=True):
            inputs = part.module(inputs.to(device))
        return inputs

    def step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Train one mini-batch; returns losses that add up to its loss."""
        outputs = self.forward(inputs)
        loss = self.loss(outputs, targets.to(outputs.device))
        loss.backward()
        self.step_optimizers()
        return [loss.detach()]

    def step_optimizers(self) -> None:
        for part in self.parts:
            part.step()

    def run(self, steps: int) -> Message:
        """Train the next mini-batches."""
        batches = [next(self._batches) for _ in range(steps)]
        self.gather()
        begin = time.monotonic_ns()
        losses = [self.step(*batch) for batch in batches]
        for device in set(self.devices):
            devices.synchronize(device)
        end = time.monotonic_ns()
        sums = [sum(float(loss) for loss in each) for each in losses if each]
        return {"begin": begin, "end": end, "losses": sums}

    def gather(self) -> None:
        """Wait for other ranks, if there are any."""


class DataParallel(Trainer):
    """torch.nn.DataParallel: the whole model on each device, a part of the mini-batch for each."""

    def build(self, way: str) -> None:
        own, self.devices = self.devices, [self.devices[0]] * len(self.devices)
        super().build(way)
        whole = nn.Sequential(*(part.module for part in self.parts))
        try:
            self._model = nn.DataParallel(whole, own)
            self._model(next(peer_trainers.endless_batches(self.config))[0])
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise UnsupportedJobError(str(error).splitlines()[0]) from error

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._model(inputs)
        return outputs


class TorchPipeline(Trainer):
    """One rank of torch.distributed.pipelining, whose tensors go from device to device.

    Over NCCL on CUDA, what torch takes for other devices, and Gloo where it knows nothing.
    """

    def __init__(self, job: Message) -> None:
        super().__init__(job)
        self._rank = job["rank"]
        self.devices = [self.devices[self._rank]]
        kind = self.devices[0].type
        if kind != "cpu":
            torch.accelerator.set_device_index(self.devices[0])
        backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
        dist.init_process_group(
            "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{backend}",
            init_method=f"file://{job['store']}",
            rank=self._rank,
            world_size=job["world_size"],
        )

    def build(self, way: str) -> None:
        from torch.distributed import pipelining  # imports torch's compiler, for seconds

        names, count = peer_trainers.layer_names(self.config), self.config.num_microbatches
        self.parts = [peer_trainers.build(self.config, self._rank, names[self._rank])]
        module = self.parts[0].module.to(self.devices[0])
        stage = pipelining.PipelineStage(module, self._rank, len(names), self.devices[0])
        create: Callable[..., Any] = pipelining.Schedule1F1B
        loss = peer_trainers.slice_loss(self.config, count)
        try:
            self._schedule = create(stage, count, loss, scale_grads=False)
        except ValueError as error:  # how torch refuses a number of micro-batches
            raise UnsupportedJobError(str(error)) from error
        self._is_last = self._rank + 1 == len(names)

    def step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        device, losses = self.devices[0], list[Tensor]()
        last = {"target": targets.to(device), "losses": losses} if self._is_last else {}
        first = [] if self._rank else [inputs.to(device)]
        self._schedule.step(*first, **last, return_outputs=False)
        self.step_optimizers()
        return [loss.detach() for loss in losses]

    def gather(self) -> None:
        dist.all_reduce(torch.zeros(1))
