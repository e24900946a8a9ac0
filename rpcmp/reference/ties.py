"""Parameters that are one and lie in several layers, in one process.

Each place has a tensor of its own, as where the places are on several hosts. Before the step their
gradients are added in the order of the config's names, to the first one's; after it all have its
value. Only the first is optimized and stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class Ties:
    """The tied parameters of a model.

    Args:
        tied: the config's.
        parameters: all, by their names in the unsplit model.
    """

    def __init__(
        self, tied: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._groups = [[parameters[name] for name in names] for names in tied]
        self.follow()

    def sum(self) -> None:
        """Let the first of each group have all of its gradients."""
        for first, *others in self._groups:
            for other in others:
                if other.grad is not None:
                    first.grad = other.grad if first.grad is None else first.grad + other.grad
                other.grad = None

    def follow(self) -> None:
        """Let all have the first one's value."""
        with torch.no_grad():
            for first, *others in self._groups:
                for other in others:
                    other.copy_(first)
