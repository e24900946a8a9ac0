"""Findings of `rpcmp doctor`, and a job to examine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcmp.config.schema import Config


def failed(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["where"], one["check"]) for one in found if one["status"] == "failed"]


def examined(**more: Any) -> Config:
    """Return a job whose callables are its user's own."""
    return Config.model_validate(
        {
            "loss": "torch.nn:MSELoss",
            "model": {"layers": "my_model:layers", "num_stages": 2},
            "data": {"train": "my_data:train"},
            "metrics": {"accuracy": "my_metrics:accuracy"},
            **more,
        }
    )
