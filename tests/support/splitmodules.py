"""Modules of tests.zoo.unsplit, and how they are cut; each is exported once per test process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import Split, split_module
from rpcmp.splitting.weights import tensors_of
from tests.zoo import unsplit

Make = Callable[[], nn.Module]


def tokens(samples: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(samples, length)
    mask[0, length // 2 :] = 0
    return {"tokens": torch.randint(11, (samples, length)), "mask": mask}


def numbers(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.randn(samples, 6)


def images(samples: int, length: int) -> Tensor:
    return torch.randn(samples, 2, length, length)


def rows(samples: int, length: int) -> Tensor:
    return torch.randn(samples, 4)


CASES: dict[str, tuple[Make, Callable[[int, int], Any]]] = {
    "language": (unsplit.Language, tokens),
    "two by two": (unsplit.TwoByTwo, numbers),
    "skips": (unsplit.Skipping, images),
    "repeating": (unsplit.Repeating, rows),
    "torn": (unsplit.Torn, rows),
    "returning": (unsplit.Returning, rows),
    "half frozen": (unsplit.HalfFrozen, tokens),
    "counting": (unsplit.Counting, rows),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda samples, length: torch.randn(samples, length, 8),
    ),
}


@cache
def split_of(name: str) -> tuple[nn.Module, Split]:
    """Return a module and how it is cut, after a journey as JSON."""
    make, batch = CASES[name]
    torch.manual_seed(0)
    module = make()
    split = split_module(module, batch(4, 8))
    return module, Split.model_validate_json(split.model_dump_json())


def layers_of(module: nn.Module, split: Split) -> list[SplitLayer]:
    tensors = tensors_of(copy.deepcopy(module))
    return [SplitLayer(split, index, tensors) for index in range(len(split.layers))]
