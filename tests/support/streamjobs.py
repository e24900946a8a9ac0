"""Jobs that train on a stream of tests.zoo.streams."""

from __future__ import annotations

from typing import Any

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.data.streams import StreamBatches

SIZE = 8
"""Samples of a mini-batch."""


def config(name: str = "Plain", test: str | None = None, **more: Any) -> Config:
    data: dict[str, Any] = {"train": f"tests.zoo.streams:{name}", "batch_size": SIZE}
    if test is not None:
        data["test"] = f"tests.zoo.streams:{test}"
    for key in ("num_workers", "sampler", "batch_size", "collate"):
        if key in more:
            data[key] = more.pop(key)
    model = {"layers": "m:layers", "num_stages": 2}
    return parse_config(
        {"loss": "torch.nn:MSELoss", "model": model, "data": data, "steps": 20, **more}
    )


def stream(config: Config) -> StreamBatches:
    """Return a stream's mini-batches, read by forks: `spawn` takes seconds for each process."""
    assert config.data is not None
    return StreamBatches(config, config.data.num_workers, "fork")
