"""Jobs in float16 that skip some steps, and a program that trains one."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.job.pipeline import Pipeline
from tests.support.places import ZOO
from tests.zoo import zoo

SCALED = """
seed = 3
max_grad_norm = 0.5
autocast = "float16"
loss_scaling = { initial = 35000.0, growth_interval = 2 }
"""
"""Text for `Faults.config`: a run of six steps skips steps 1, 2 and 5."""

SPIKED = """
autocast = "float16"
loss_scaling = { initial = 64.0, growth_interval = 2 }
"""

PIPELINES = """
[[stages]]
replicas = 2
[[stages]]
replicas = 2
[data]
train = { callable = "zoo:spiked", kwargs = { samples = 24, where = 18 } }
shuffle = false
batch_size = 8
"""
"""In every third step micro-batch 1 overflows; second replicas compute it."""


def launched(**more: Any) -> Config:
    data = {
        "loss": "torch.nn:MSELoss",
        "num_microbatches": 2,
        "autocast": "float16",
        "loss_scaling": {"initial": 1024.0, "growth_interval": 3},
        "model": {"layers": "zoo:mlp", "balance": [2, 2]},
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}},
        **more,
    }
    return Config.model_validate(data).with_folder(ZOO)


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    inputs, targets = zoo.regression(10).tensors
    return inputs * scale, targets


def use(pipeline: Pipeline, lose: Any) -> tuple[list[Any], str]:
    """Make all kinds of calls, some of which skip a step; return their results and a final hash."""
    optimizer = pipeline.optimizer
    found: list[Any] = [pipeline.train_step(*batch())]
    lose()
    found += [math.isfinite(pipeline.train_step(*batch(1e9))), optimizer.skipped_steps]
    pipeline.forward_backward(*batch())
    lose()
    pipeline.forward_backward(*batch())
    found += [optimizer.clip_grad_norm_(0.5), optimizer.clip_grad_norm_(10.0), optimizer.step()]
    pipeline.forward_backward(*batch(1e9))
    found += [optimizer.step(), optimizer.skipped_steps, optimizer.loss_scale]
    lose()
    found += [pipeline.train_step(*batch()), optimizer.state_dict()["scaler"]]
    return found, pipeline.parameters_sha256()


def hopeless(**more: Any) -> Config:
    """Return a job whose gradients are never finite, with a scale that shrinks fast."""
    scaling = {"initial": 1.0, "backoff_factor": 0.01}
    return launched(loss_scaling=scaling, recovery={"watchdog": 10.0}, **more)
