"""Where a module is cut, and what passes there."""

from __future__ import annotations

from typing import cast

import pytest
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from rpcmp.errors import ConfigError
from rpcmp.splitting.cutting import find_blocks
from rpcmp.splitting.split import split_module
from tests.support.splitmodules import rows, split_of, tokens
from tests.zoo import unsplit


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("language", ["embed", "layers.0", "layers.1", "layers.2", "head"]),
        ("two by two", ["left", "blocks.0", "blocks.1", "blocks.2", "first"]),
        ("skips", ["down.0", "down.1", "middle.convolve", "up.0", "up.1", "out"]),
        ("repeating", ["begin", "blocks.0", "end"]),
        ("torn", ["blocks.0", "blocks.2"]),
        ("returning", ["blocks.0", "blocks.1", "end"]),
        ("half frozen", ["embed", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "embed+"]),
        ("counting", ["begin", "blocks.0"]),
    ],
)
def test_a_layer_is_a_block_or_lies_between_two(name: str, layers: list[str]) -> None:
    assert [layer.name for layer in split_of(name)[1].layers] == layers


@pytest.mark.parametrize(
    ("name", "numbers"), [("language", [2, 3, 3, 3, 1]), ("skips", [1, 2, 2, 2, 1, 1])]
)
def test_what_is_alive_passes_and_nothing_else(name: str, numbers: list[int]) -> None:
    _, split = split_of(name)
    assert [len(layer.training.inputs) for layer in split.layers] == numbers
    assert [len(layer.evaluation.inputs) for layer in split.layers] == numbers


def test_the_outermost_repeated_blocks_are_found() -> None:
    module = nn.Module()
    inner = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2)]
    module.encoder = nn.Sequential(nn.Identity(), nn.ModuleList(inner))
    module.decoder = nn.ModuleList([nn.Linear(1, 1), nn.Identity()])
    assert find_blocks(module) == ["encoder.1.0", "encoder.1.1"]
    assert find_blocks(module, ["decoder.*", "encoder.1"]) == [
        "encoder.1",
        "decoder.0",
        "decoder.1",
    ]


def test_parametrized_blocks_are_of_one_class_and_a_pattern_means_the_outermost() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(
        weight_norm(nn.Linear(1, 1)) if number else nn.Linear(1, 1) for number in range(2)
    )
    assert find_blocks(module) == ["blocks.0", "blocks.1"]
    assert find_blocks(module, ["blocks.*"]) == ["blocks.0", "blocks.1"]


def test_where_nothing_is_repeated_what_follows_each_other_is_a_layer() -> None:
    root = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Flatten())
    assert find_blocks(root) == ["0", "1", "2"]
    module = nn.Module()
    module.body = root
    assert find_blocks(module) == ["body.0", "body.1", "body.2"]
    assert find_blocks(nn.Sequential(*(nn.Linear(1, 1) for _ in range(2)))) == ["0", "1"]
    assert find_blocks(nn.Bilinear(1, 1, 1)) == []


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["layer.*"], "split: 'layer.\\*' fits no submodule of the model"),
        (["layers.[3]"], "fits no submodule of the model"),
        (["laiers"], "fits no submodule of the model.*layers"),
        (["layers", "layers.1"], "split: 'layers.1' lies in 'layers': name one of them"),
    ],
)
def test_patterns_that_name_no_blocks_are_refused(patterns: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_blocks(unsplit.Language(), patterns)


class Reaching(nn.Module):
    """Calls parts of its blocks, and not the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for part in cast(nn.Sequential, block):
                x = part(x)
        return x


def test_a_block_whose_parts_are_called_is_a_layer() -> None:
    split = split_module(Reaching(), rows(4, 8))
    assert [layer.name for layer in split.layers] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_layer_can_be_named_by_hand() -> None:
    split = split_module(unsplit.Language(), tokens(4, 8), ["layers.[12]"])
    assert [layer.name for layer in split.layers] == ["embed", "layers.1", "layers.2", "head"]
