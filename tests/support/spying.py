"""A job whose code tries to open files and reports the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import JobFolder, Result

SPY = """
import os
import torch, zoo
from torch import nn
from torch.utils.data import TensorDataset

def spy(who, paths):
    for path in paths:
        try:
            open(path).close()
            answer = "open"
        except OSError as error:
            answer = type(error).__name__
        print(f"SPY {who} {path} {answer}", flush=True)

class Spy(nn.Module):
    def __init__(self, paths):
        super().__init__()
        spy("stage", paths)

    def forward(self, x):
        return x

def layers(paths):
    return [*zoo.mlp(), ("spy", lambda: Spy(paths))]

def error(outputs, targets, paths):
    return (outputs - targets).abs().mean()

def data(paths=(), file=None):
    spy("data", paths)
    if file is not None:
        open(file).read()
    return zoo.regression()
"""


def spying(
    job: JobFolder, paths: Sequence[Path], data: str = "", balance: Sequence[int] = (2, 3)
) -> Path:
    """Write a job whose code tries to open files, at a stage and while loading data.

    Args:
        data: further keys of `[data]`.
    """
    (job.folder / "spying.py").write_text(SPY)
    names = json.dumps([str(path) for path in paths])
    return job.config(
        f"""
        steps = 8
        [model]
        layers = "spying:layers"
        kwargs = {{ paths = {names} }}
        balance = {list(balance)}
        [data]
        train = {{ callable = "spying:data", kwargs = {{ paths = {names} }} }}
        batch_size = 10
        {data}
        """
    )


def seen(result: Result, who: str) -> dict[str, str]:
    """Return the result of opening each path."""
    lines = [event["text"] for event in result.events if event["event"] == "log"]
    words = [line.split() for line in lines if line.startswith(f"SPY {who} ")]
    return {path: answer for _, _, path, answer in words}


def sha256(result: Result) -> str:
    assert result.code == 0, result.err
    found: str = result.event("summary")["parameters_sha256"]
    return found
