"""Blocks of the same depth side by side, each with another kernel size, joined at the end.

    image --> Stem --+--> Block, 1 x 1 --+
                     +--> Block, 3 x 3 --+--> Join --> logits
                     +--> Block, 5 x 5 --+

The stem computes its features once, and each block gets a copy. The blocks work at the same time.
Their gradients are summed at the stem, always in the same order.
"""

import torch
from torch import Tensor, nn

NUM_CLASSES = 10


class Stem(nn.Module):
    """From images `(N, 1, 8, 8)` to features `(N, width, 8, 8)`, all float32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class Block(nn.Module):
    """From features `(N, width, 8, 8)` to `(N, width, 4, 4)`, all float32.

    Args:
        kernel: kernel size of its convolutions; odd.
    """

    def __init__(self, kernel: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(self.convolution(width, kernel) for _ in range(2)),
            nn.MaxPool2d(kernel_size=2),
        )

    @staticmethod
    def convolution(width: int, kernel: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features)
        return outputs


class Join(nn.Module):
    """From any number of branches, each `(N, width, 4, 4)`, to logits `(N, 10)`, all float32."""

    def __init__(self, branches: int = 3, width: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.decide = nn.Sequential(
            nn.Conv2d(branches * width, 2 * width, kernel_size=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, NUM_CLASSES),
        )

    def forward(self, *branches: Tensor) -> Tensor:
        logits: Tensor = self.decide(torch.cat(branches, dim=1))
        return logits
