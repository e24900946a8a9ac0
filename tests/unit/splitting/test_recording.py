"""What a module's parts are called with, noted while it is exported, leaves the export as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.splitting.recording import FreeSize, Shape, recorded
from rpcmp.splitting.split import split_module


class Part(nn.Module):
    def forward(self, x: Tensor, length: int, *, more: dict[str, Any]) -> Tensor:
        found: Tensor = x[:, :length] * more["scale"]
        return found


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer, self.calls = Part(), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        more = {"scale": 0.5, "cache": object()}
        found: Tensor = self.layer(self.part(x, x.shape[1], more=more))
        return found


def test_calls_have_shapes_and_which_sizes_are_free() -> None:
    module = Whole()
    with recorded(module) as recording:
        split = split_module(module, torch.ones(3, 5, 8))
    whole = Shape(torch.float32, (3, 5, 8), (True, True, True))  # the layer fixes the last later
    call = recording.calls["part"]
    assert call.args == (whole, FreeSize(5))
    assert call.kwargs == {"more": {"scale": 0.5, "cache": None}}
    assert [*recording.calls] == ["", "part", "layer"]
    assert split.inputs[0].sizes == [None, None, 8]
    assert [seen.changed for seen in recording.forwards] == [{"calls": "number"}] * 2


def test_a_module_has_no_hooks_afterwards_even_if_its_export_fails() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    try:
        with recorded(module):
            module(torch.ones(1, 5))
    except RuntimeError:
        pass
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in module.modules())
