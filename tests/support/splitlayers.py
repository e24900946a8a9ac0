"""Layers whose weight gradients can be split off, in a process of tests."""

from __future__ import annotations

import pytest
import torch

from rpcmp import split


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers split for the time of a test; in a worker the functions stay replaced."""
    for name in ("linear", *split.CONVOLUTIONS):
        monkeypatch.setattr(torch.nn.functional, name, getattr(torch.nn.functional, name))
    split.install()
