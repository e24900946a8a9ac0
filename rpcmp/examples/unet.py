"""A U-Net over four stages: it finds the digit that each pixel of a scene belongs to.

    image --> Down "fine" --> Down "coarse" --> Up "lift" --> Finish --> a class for each pixel
                  |                 +---- skip ----^             ^
                  +------------------ skip ----------------------+

On the way down the image shrinks and gets more features. On the way up each stage also reads the
features of the same size from the way down. Such a skip goes directly from the stage that computes
it to the one that reads it. The stages between them neither wait for it nor carry it.

The scenes are made of the digits that ship with scikit-learn, several on a noisy background.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rpcmp.examples import digits

DIGIT = 8  # height and width of a digit, in pixels
GRID = 4  # a scene has GRID x GRID places for digits, of which about half are empty
GROUND = 10  # the class of pixels without ink; classes 0 to 9 are the digits
NUM_CLASSES = 11
INK = 0.25  # least darkness of a pixel that belongs to a digit
NOISE = 0.1
NUM_TRAINING_IMAGES = 1437  # 80 % of 1,797; the others are in the test scenes
SEED = 0


def convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return two convolutions from `(N, in_channels, H, W)` to `(N, out_channels, H, W)`."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class Down(nn.Module):
    """From `(N, in_channels, H, W)` to a dict of two tensors, all float32.

    "skip" has the features `(N, out_channels, H, W)`, "down" the same at half the height and width.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.find = convolutions(in_channels, out_channels)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        skip = self.find(features)
        return {"skip": skip, "down": functional.max_pool2d(skip, kernel_size=2)}


class Up(nn.Module):
    """Doubles height and width, and joins the features with the saved ones of the way down.

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
    """The last step up: from features and the first skip to logits `(N, 11, 2H, 2W)`."""

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
    """Return `scenes` scenes of one split, "train" or "test".

    Each item is a scene `(1, 32, 32)` float32 and the class of each pixel `(32, 32)` int64: a
    digit, or GROUND.
    """
    images, classes = digits.load_digits()
    parts = {"train": slice(NUM_TRAINING_IMAGES), "test": slice(NUM_TRAINING_IMAGES, None)}
    if split not in parts:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(parts)}")
    images, classes = images[parts[split]].squeeze(1), classes[parts[split]]
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(images), (scenes, GRID * GRID), generator=generator)
    is_there = torch.rand(scenes, GRID * GRID, 1, 1, generator=generator) < 0.5
    ink = images[chosen] * is_there  # (scenes, places, 8, 8)
    labels = torch.where(ink >= INK, classes[chosen][:, :, None, None], GROUND)
    noise = NOISE * torch.randn(scenes, 1, GRID * DIGIT, GRID * DIGIT, generator=generator)
    return TensorDataset(assemble(ink).unsqueeze(1) + noise, assemble(labels))


def assemble(tiles: Tensor) -> Tensor:
    """Return scenes `(N, 32, 32)` made of tiles `(N, 16, 8, 8)`, row by row."""
    rows: Tensor = tiles.unflatten(1, (GRID, GRID)).transpose(2, 3)  # (N, row, y, column, x)
    return rows.reshape(len(tiles), GRID * DIGIT, GRID * DIGIT)


# The metric.


def ink_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of a scene's pixels with ink whose digit is right, as a mean over scenes.

    The ground, most of a scene, does not count. A share of all scenes' ink together would be no
    mean over samples, and so depend on how a mini-batch is cut.
    """
    ink = targets != GROUND
    right = (outputs.argmax(dim=1) == targets) & ink
    return (right.sum((1, 2)) / ink.sum((1, 2)).clamp(min=1)).mean()
