"""A small job of two stages."""

from __future__ import annotations

from typing import Any

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config

STAGES = ("stage0", "stage1")


def job(**more: Any) -> Config:
    """Return a job with two steps per epoch."""
    data = {"train": "tests.zoo.models:dataset", "batch_size": 5}
    model = {"layers": "tests.zoo.models:layers", "num_stages": 2}
    return parse_config({"loss": "torch.nn:MSELoss", "model": model, "data": data, **more})
