"""Mappings that are not dicts, as from transformers' tokenizers and collators."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate


class Encoding(UserDict[str, Any]):
    """The mapping of a sample or a mini-batch."""


def collate(samples: list[Any]) -> Encoding:
    """A mapping in a mapping."""
    return Encoding(more=Encoding(default_collate(samples)))


def loss(outputs: Tensor, batch: Any) -> Tensor:
    """Compute the loss with the targets in the mapping."""
    return torch.nn.functional.mse_loss(outputs, batch["more"]["y"])
