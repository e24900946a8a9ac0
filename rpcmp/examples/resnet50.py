"""ResNet-50 with the names of torchvision, so that its state dicts fit.

A stem, 16 bottleneck blocks in four groups, and a classifier: a list of 22 layers that may be cut
anywhere. The usual cut in two is after the second group, balance = [11, 11].

Real images of a thousand classes would have to be downloaded, so these are synthetic: each class
has its own pattern, and an image is the pattern of its class plus noise of the same strength.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

GROUPS = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Channels inside the blocks of each group, and the number of blocks."""

EXPANSION = 4  # ratio of the channels of a block's output to those inside
PATTERN = 8  # height and width of a class's pattern, before it is enlarged
SEED = 0


def layers(classes: int = 1000) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the model's layers in order, each a name and a factory: conv1, ..., layer1.0, ..., fc.

    Input: images `(N, 3, H, W)` float32. Output: logits `(N, classes)` float32.
    """
    return [
        ("conv1", lambda: convolution(3, 64, kernel=7, stride=2)),
        ("bn1", lambda: nn.BatchNorm2d(64)),
        ("relu", lambda: nn.ReLU(inplace=True)),
        ("maxpool", lambda: nn.MaxPool2d(kernel_size=3, stride=2, padding=1)),
        *blocks(),
        ("avgpool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())),
        ("fc", lambda: nn.Linear(GROUPS[-1][0] * EXPANSION, classes)),
    ]


def blocks() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the blocks of all groups: layer1.0 to layer4.2."""
    in_channels = 64
    for group, (width, count) in enumerate(GROUPS, start=1):
        for index in range(count):
            stride = 2 if group > 1 and index == 0 else 1
            yield f"layer{group}.{index}", block(in_channels, width, stride)
            in_channels = width * EXPANSION


def block(in_channels: int, width: int, stride: int) -> Callable[[], nn.Module]:
    """Return the factory of one block."""
    return lambda: Bottleneck(in_channels, width, stride)


class Bottleneck(nn.Module):
    """From `(N, in_channels, H, W)` to `(N, 4 * width, H / stride, W / stride)`, float32.

    Three convolutions (the first narrows, the last widens) are added to the shortcut.
    """

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.conv1 = convolution(in_channels, width, kernel=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, kernel=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, out_channels, kernel=1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        nn.init.zeros_(self.bn3.weight)  # each block starts as its shortcut: a large rate is safe
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            shortcut = convolution(in_channels, out_channels, kernel=1, stride=stride)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out_channels))

    def forward(self, features: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(features)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        shortcut = features if self.downsample is None else self.downsample(features)
        joined: Tensor = self.relu(residual + shortcut)
        return joined


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with ResNet's padding and initial weights."""
    layer = nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


# The images.


class Patterns(Dataset[tuple[Tensor, Tensor]]):
    """Images that are computed on access, always the same ones.

    Each item is an image `(3, size, size)` float32 and its class, a scalar int64.
    """

    def __init__(self, images: int, classes: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.patterns = torch.randn(classes, 3, PATTERN, PATTERN, generator=generator)
        self.images = images
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        kind = index % len(self.patterns)
        generator = torch.Generator().manual_seed(self.seed + index)
        pattern = functional.interpolate(self.patterns[kind].unsqueeze(0), self.size).squeeze(0)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return pattern + noise, torch.tensor(kind)


def dataset(split: str, images: int, classes: int = 1000, size: int = 128) -> Patterns:
    """Return `images` images of one split, "train" or "test"; no image is in both."""
    seeds = {"train": 0, "test": 1 << 32}
    if split not in seeds:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(seeds)}")
    return Patterns(images, classes, size, seeds[split])
