"""Manifests of checkpoints without files."""

from __future__ import annotations

import hashlib
from typing import Any

from rpcmp.checkpoint.manifest import Cursor, Manifest, StageFile

SHA = hashlib.sha256(b"abc").hexdigest()


def stage(name: str = "stage0", layers: tuple[str, ...] = ("embed", "hidden")) -> StageFile:
    """Return one stage's part, for a file that contains b"abc"."""
    return StageFile(
        name=name,
        layers=list(layers),
        file=f"{name}.safetensors",
        sha256=SHA,
        size=3,
        host="h1",
        state='{"lr": [0.1]}',
    )


def manifest(step: int = 120, **fields: Any) -> Manifest:
    """Return the manifest of a checkpoint of two stages."""
    defaults: dict[str, Any] = {
        "job": "digits",
        "run": "r1",
        "step": step,
        "generation": 1,
        "cursor": Cursor(epoch=2, batch=7),
        "driver": {"loss": 0.1, "best": None},
        "rng": {"python": [3, [1, 2], None]},
        "versions": {"rpcmp": "0.1.0", "torch": "2.13.0"},
        "config": {"name": "digits", "epochs": 3},
        "written": "2025-01-02T03:04:05+00:00",
        "stages": [stage(), stage("stage1", ("head",))],
    }
    return Manifest(**{**defaults, **fields})
