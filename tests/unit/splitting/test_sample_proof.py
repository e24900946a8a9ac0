"""Micro-batches of a module are compared with the mini-batch of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.splitting.sample_proof import require_independent
from rpcmp.splitting.side_by_side import SideBySide
from rpcmp.splitting.split import split_module


class Own(nn.Module):
    """Computes by `kind`: "plain", "centered" samples, a "cumulated" sum, one that "draws"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False) if kind == "batch norm" else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.norm is not None:
            y = self.norm(y)
        if self.kind == "draws":
            return y * torch.rand_like(y)
        return {"centered": y - y.mean(0), "cumulated": y.cumsum(0)}.get(self.kind, y)


def compared(kind: str) -> None:
    torch.manual_seed(0)
    module, batches = Own(kind), [torch.randn(3, 4), torch.randn(3, 4)]
    require_independent(SideBySide(module, split_module(module, batches[0]), None, kind), batches)


@pytest.mark.parametrize("kind", ["plain", "draws", "batch norm"])
def test_samples_that_do_not_meet_pass_and_what_no_samples_can_tell(kind: str) -> None:
    compared(kind)


@pytest.mark.parametrize("kind", ["centered", "cumulated"])
def test_samples_that_depend_on_others_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind} computes something else for samples in two"):
        compared(kind)
