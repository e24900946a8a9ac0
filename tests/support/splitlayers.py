"""Layers whose weight gradients can be split off, in a process of tests."""

from __future__ import annotations

import pytest
import torch

from rpcmp.worker import weight_grad


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split layers for the duration of a test; in a worker the functions stay replaced."""
    for name in ("linear", *weight_grad.CONVOLUTIONS):
        monkeypatch.setattr(torch.nn.functional, name, getattr(torch.nn.functional, name))
    weight_grad.install()
