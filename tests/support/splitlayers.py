"""Layers that split off weight gradients, in a process of tests."""

from __future__ import annotations

import pytest
import torch

from rpcmp.worker import weight_grad


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions of layers for one test; in a worker they stay replaced."""
    for name in ("linear", *weight_grad.CONVOLUTIONS):
        monkeypatch.setattr(torch.nn.functional, name, getattr(torch.nn.functional, name))
    weight_grad.install()
