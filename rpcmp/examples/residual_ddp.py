"""A residual network in one stage, whose replicas share each batch.

This is what `DistributedDataParallel` does. Every replica holds the whole model and computes a part
of the micro-batches. Before each step the gradients are summed, so that all replicas stay the same.
Batch normalization sees one micro-batch at a time, and its running statistics come from the
first replica, as in DistributedDataParallel.
"""

from torch import Tensor, nn

NUM_CLASSES = 10


class ResidualBlock(nn.Module):
    """From features `(N, width, H, W)` to features of the same shape, float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = self.relu(features + self.change(features))
        return changed


class Network(nn.Module):
    """From images `(N, 1, 8, 8)` to logits `(N, 10)`, all float32."""

    def __init__(self, blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, NUM_CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)))
        return logits
