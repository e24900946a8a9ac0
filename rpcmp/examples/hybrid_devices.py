"""Preprocessing of images on the CPU, and a model on the GPU if there is one.

The first stage has no parameters, so it is not trained. It shifts images at random in training,
subtracts their mean brightness, and adds their edges. Random numbers depend on (seed, step,
micro-batch, layer), on every device. The second stage is the model.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_CLASSES = 10
CHANNELS = 3  # the image, and its edges in both directions


class Preprocess(nn.Module):
    """From images `(N, 1, 8, 8)` to `(N, 3, 8, 8)`, float32: the image and its edges.

    Args:
        shift: most pixels by which an image moves in training.
    """

    def __init__(self, shift: int = 1) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.shift:
            images = self.shift_randomly(images)
        centred = images - images.mean(dim=(2, 3), keepdim=True)
        across = functional.pad(centred.diff(dim=3), (0, 1))
        down = functional.pad(centred.diff(dim=2), (0, 0, 0, 1))
        return torch.cat([centred, across, down], dim=1)

    def shift_randomly(self, images: Tensor) -> Tensor:
        """Shift each image on its own, and fill with empty pixels."""
        size = images.shape[-1]
        padded = functional.pad(images, [self.shift] * 4)
        starts = torch.randint(0, 2 * self.shift + 1, (len(images), 2)).tolist()
        pieces = zip(padded, starts, strict=True)
        return torch.stack([one[:, y : y + size, x : x + size] for one, (y, x) in pieces])


class Model(nn.Module):
    """From prepared images `(N, 3, 8, 8)` to logits `(N, 10)`, float32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(CHANNELS, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),
            nn.Flatten(),
            nn.Linear(8 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits
