"""Events of made-up runs, for tests of tools that read runs; checkpoints of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpcmp.checkpoint.folder import CheckpointFolder, newest_in
from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.observability.run_folder import RunFolder
from rpcmp.process.channel import Message
from tests.support.runevents import typed

STAGES = ("lift", "head")
LOST = {"bubble": 0.2, "network": 0.05, "overhead": 0.0}
BEGIN = 1_800_000_000.0
"""Start of the runs; a step takes a second."""


def checkpoints_in(folder: Path) -> CheckpointFolder:
    """Return the checkpoints of the run that wrote last."""
    run = newest_in(folder)
    assert run is not None, f"no run has left a checkpoint in {folder}"
    return run.folder


def config(folder: Path, **more: Any) -> Config:
    """Return the config of a run in `folder`."""
    data = {
        "name": "job",
        "loss": "torch.nn:MSELoss",
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1, "note": "a secret"}},
        "model": {"layers": "zoo:mlp", "balance": [2, 2]},
        "data": {"train": "zoo:regression", "test": "zoo:regression"},
        **more,
    }
    return loader.parse_config(data).with_folder(folder)


def run(of: Config) -> Message:
    """Return the first event of a run."""
    stages = [
        {
            "name": name,
            "index": index,
            "inputs": ["input"] if not index else ["lift", "lift.skip", "target"],
            "replicas": 1,
            "device": "cpu",
            "schedule_row": index,
        }
        for index, name in enumerate(STAGES)
    ]
    return {
        "event": "run",
        "name": of.name,
        "config": of.model_dump(mode="json"),
        "versions": {"rpcmp": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "driver": "here",
        "pid": 1,
        "job_id": "abc",
        "graph": {"stages": stages},
        "workers": [],
        "time": BEGIN,
        "generation": 1,
    }


def step(number: int, loss: float) -> Message:
    """Return one step's event."""
    return {
        "event": "step",
        "step": number,
        "epoch": 1,
        "loss": loss,
        "samples_per_s": 100.0 + number,
        "step_s": 0.5 if number > 1 else 4.0,
        "data_share": 0.25,
        "busy": dict.fromkeys(STAGES, 0.75),
        "busy_seconds": {label: {"F": 0.1, "B": 0.2} for label in STAGES},
        "learning_rate": 0.1,
        "learning_rates": dict.fromkeys(STAGES, 0.1),
        "time": BEGIN + number,
        "generation": 1,
    }


def events(of: Config, losses: Sequence[float]) -> list[Message]:
    """Return the events of a run with these losses, one evaluation and one fault."""
    ended = BEGIN + len(losses) + 1
    common = {"time": ended, "generation": 1}
    metrics = {"loss": 0.5, "accuracy": 0.9}
    stages = [{"label": label, "host": "here", "spans": [], "lost": LOST} for label in STAGES]
    memory = {label: {"idle": 2**20, "peak": 3 * 2**20} for label in STAGES}
    return [
        run(of),
        {"event": "start", "steps": len(losses), "time": BEGIN, "generation": 1},
        *(step(number, loss) for number, loss in enumerate(losses, start=1)),
        {"event": "timeline", "step": 1, "seconds": 0.5, "stages": stages, **common},
        {"event": "fault", "step": 1, "error": "it was killed", "stage": "head", **common},
        {"event": "eval", "step": len(losses), "epoch": 1, **metrics, **common},
        {
            "event": "summary",
            "steps": len(losses),
            "loss": losses[-1],
            "metrics": metrics,
            "memory": memory,
            "parameters_sha256": "0" * 64,
            **common,
        },
        {"event": "end", "outcome": "done", "error": "", **common},
    ]


def write_run_folder(config: Config, events: Sequence[Message]) -> Path:
    """Write the run folder for these events, and return its path."""
    folder = RunFolder(config, lambda write: lambda event: write(event.event))
    folder.make()
    for event in events:
        folder.handle(typed(event))
    folder.close()
    assert folder.path is not None
    return folder.path
