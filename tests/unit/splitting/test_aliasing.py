"""Values that share memory, and the operations that write to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.splitting import regions
from rpcmp.splitting.aliasing import AliasSets
from rpcmp.splitting.exporting import export
from rpcmp.splitting.split import split_module
from tests.support.splitmodules import rows
from tests.zoo import unsplit


class Writing(nn.Module):
    """Writes in the ways that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = x + 1, x + 2, x + 3, x > 0
        first = torch.einsum("ij->ji", a)
        second = self.drop(b)
        left, right = c.split(2, 1)
        left.relu_()
        with torch.no_grad():
            torch.add(first, 1, out=first)
        d |= first.T > 0
        return a, second, right, d


def test_every_way_to_write_is_seen() -> None:
    graph = regions.inline(export(Writing(), rows(4, 8), training=True).program)
    memory = AliasSets(graph)
    by_name = {node.name: node for node in graph.nodes}
    groups: dict[str, set[str]] = {}
    for name, node in by_name.items():
        groups.setdefault(memory.of(node).name, set()).add(name)

    def around(name: str) -> set[str]:
        return groups[memory.of(by_name[name]).name]

    assert "einsum" in around("add")
    assert "dropout" in around("add_1")  # in evaluation it returns its argument
    assert sum(name.startswith(("split", "getitem")) for name in around("add_2")) == 3
    written = {name for base in memory.written for name in groups[base.name]}
    assert {"add", "add_2", "gt"} <= written
    assert written.isdisjoint({"x", "leaves_0", "add_1", "dropout"})


def test_a_tensor_that_is_no_buffer_may_not_be_changed() -> None:
    with pytest.raises(ConfigError, match=r"changes 'last', which no state dict has: make it a b"):
        split_module(unsplit.Remembering(), rows(4, 8))
