"""Jobs that train on a stream of tests.zoo.streams."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import torch

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.data.streams import StreamBatches

SIZE = 8
"""Samples of a mini-batch."""


def config(name: str = "Plain", test: str | None = None, **more: Any) -> Config:
    train = {"callable": f"tests.zoo.streams:{name}", "kwargs": more.pop("kwargs", {})}
    data: dict[str, Any] = {"train": train, "batch_size": SIZE}
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


def shards(folder: Path) -> Path:
    """Write two tar files of 16 samples, as webdataset reads them; return the folder."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(16):
                for kind, size in (("x", 8), ("y", 1)):
                    file = io.BytesIO()
                    torch.save(torch.rand(size, generator=generator), file)
                    about = tarfile.TarInfo(f"{number}-{sample:03}.{kind}.pth")
                    about.size = file.tell()
                    tar.addfile(about, io.BytesIO(file.getvalue()))
    return folder
