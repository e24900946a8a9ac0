"""Gradients, some of them missing, in a form that compares by bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def lists(gradients: Sequence[Tensor | None]) -> list[Any]:
    return [None if gradient is None else gradient.tolist() for gradient in gradients]
