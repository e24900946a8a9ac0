"""A U-Net over four stages: it finds for each pixel of a scene the digit that it belongs to.

    image --> Down "fine" --> Down "coarse" --> Up "lift" --> Finish --> a class for each pixel
                  |                 +---- skip ----^             ^
                  +------------------ skip ----------------------+

On the way down the picture gets smaller and its features more; on the way up each stage also reads
what the stage of its size had kept. A skip goes straight from the stage that has it to the one that
reads it, past all stages between them, which neither wait for it nor carry it.

The scenes are made of the digits that ship with scikit-learn, several on a noisy ground.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

DIGIT = 8  # height and width of a digit, in pixels
GRID = 4  # a scene has GRID x GRID places, each a digit's size, of which about half are empty
GROUND = 10  # the class of pixels without ink; the others are those of the digits, 0 to 9
NUM_CLASSES = 11
INK = 0.25  # a pixel at least so dark belongs to its digit
NOISE = 0.1
NUM_TRAINING_IMAGES = 1437  # 80 % of 1,797; the others are in the test scenes
SEED = 0


def convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    """Features `(N, in_channels, H, W)` to `(N, out_channels, H, W)`, by two convolutions."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class Down(nn.Module):
    """From `(N, in_channels, H, W)` to a dict of two, all float32.

    "skip" is what was found, `(N, out_channels, H, W)`; "down" is the same at half of the height
    and width.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.find = convolutions(in_channels, out_channels)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        found = self.find(features)
        return {"skip": found, "down": functional.max_pool2d(found, kernel_size=2)}


class Up(nn.Module):
    """Back to twice the height and width, joined with what was there on the way down.

    From features `(N, in_channels, H, W)` and a skip `(N, skip_channels, 2H, 2W)` to
    `(N, skip_channels, 2H, 2W)`, all float32.
    """

    def __init__(self, in_channels: int, skip_channels: int) -> None:
        super().__init__()
        self.think = convolutions(in_channels, 2 * in_channels)
        self.up = nn.ConvTranspose2d(2 * in_channels, skip_channels, kernel_size=2, stride=2)
        self.join = convolutions(2 * skip_channels, skip_channels)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        larger = self.up(self.think(features))
        joined: Tensor = self.join(torch.cat([larger, skip], dim=1))
        return joined


class Finish(nn.Module):
    """The last way up: from features and the first skip to logits `(N, 11, 2H, 2W)`."""

    def __init__(self, in_channels: int, skip_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, skip_channels, kernel_size=2, stride=2)
        self.join = convolutions(2 * skip_channels, skip_channels)
        self.decide = nn.Conv2d(skip_channels, NUM_CLASSES, kernel_size=1)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        joined = self.join(torch.cat([self.up(features), skip], dim=1))
        logits: Tensor = self.decide(joined)
        return logits


# The scenes.


def dataset(split: str, scenes: int) -> TensorDataset:
    """So many scenes of one split, "train" or "test".

    Each item is a scene `(1, 32, 32)` float32, and the class of each of its pixels, `(32, 32)`
    int64: its digit, or GROUND.
    """
    images, digits = load_digits()
    parts = {"train": slice(NUM_TRAINING_IMAGES), "test": slice(NUM_TRAINING_IMAGES, None)}
    if split not in parts:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(parts)}")
    images, digits = images[parts[split]], digits[parts[split]]
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(images), (scenes, GRID * GRID), generator=generator)
    is_there = torch.rand(scenes, GRID * GRID, 1, 1, generator=generator) < 0.5
    ink = images[chosen] * is_there  # (scenes, places, 8, 8)
    classes = torch.where(ink >= INK, digits[chosen][:, :, None, None], GROUND)
    noise = NOISE * torch.randn(scenes, 1, GRID * DIGIT, GRID * DIGIT, generator=generator)
    return TensorDataset(in_place(ink).unsqueeze(1) + noise, in_place(classes))


def in_place(tiles: Tensor) -> Tensor:
    """Scenes `(N, 32, 32)` of tiles `(N, 16, 8, 8)`, row by row."""
    rows: Tensor = tiles.unflatten(1, (GRID, GRID)).transpose(2, 3)  # (N, row, y, column, x)
    return rows.reshape(len(tiles), GRID * DIGIT, GRID * DIGIT)


def load_digits() -> tuple[Tensor, Tensor]:
    """All images `(1797, 8, 8)` float32 between 0 and 1, and their digits `(1797,)` int64."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'rpcmp[examples]'"
        ) from error
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16  # pixels: 0 to 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


# What training is judged by.


def ink_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the pixels with ink that are given the right digit.

    The ground, most of a scene, does not count.
    """
    ink = targets != GROUND
    return (outputs.argmax(dim=1) == targets)[ink].float().mean()
