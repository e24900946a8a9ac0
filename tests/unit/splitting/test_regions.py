"""Regions of a forward, such as those without gradients, which can be cut."""

from __future__ import annotations

import pytest

from rpcmp.errors import ConfigError
from rpcmp.splitting.exporting import export
from rpcmp.splitting.program import Node
from tests.support.splitmodules import rows, split_of
from tests.zoo import unsplit


def kinds(nodes: list[Node]) -> list[str]:
    return [each for node in nodes if node.body for each in (node.calls, *kinds(node.body.nodes))]


def test_each_layer_enters_the_regions_that_it_is_cut_out_of() -> None:
    _, split = split_of("half frozen")
    assert [kinds(layer.training.nodes) for layer in split.layers] == [
        [],
        ["no_grad"],
        ["no_grad", "autocast"],
        ["autocast"],
        ["autocast"],
        [],
    ]


def test_a_region_that_torch_loses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"enters torch\.no_grad\(\).* within torch\.autocast"):
        export(unsplit.Losing(), rows(4, 8), training=True)


def test_an_autocast_is_for_the_device_of_the_stage() -> None:
    _, split = split_of("half frozen")
    (region,) = (node for node in split.layers[4].training.nodes if node.body is not None)
    assert region.kwargs == {
        "device_type": None,
        "dtype": {"dtype": "bfloat16"},
        "enabled": True,
    }
