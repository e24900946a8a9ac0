"""Handwritten digits read by two encoders side by side, and one classifier.

One tower reads the image, the other only its profile: the amount of ink in each row and column. The
classifier reads the features of both, and the profile itself. So the stages form a graph in which
the towers work at the same time, and a skip goes directly to the classifier:

    image ----> ImageTower ------+
                                 +--> Classifier --> logits
    profile -+> ProfileTower ----+
             |                   |
             +-------------------+

Each class is one stage. The config names it, sets its arguments, and lists its inputs.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from rpcmp.examples import digits

NUM_CLASSES = 10
PROFILE_SIZE = 16  # 8 rows and 8 columns

Item = tuple[dict[str, Tensor], Tensor]


class ImageTower(nn.Module):
    """From images `(N, 1, 8, 8)` to features `(N, features)`, all float32."""

    def __init__(self, width: int = 32, features: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),
            nn.Flatten(),
            nn.Linear(8 * width, features),
            nn.ReLU(),
        )

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.encoder(image)
        return features


class ProfileTower(nn.Module):
    """From profiles `(N, 16)` to features `(N, features)`, all float32."""

    def __init__(self, width: int = 128, features: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(PROFILE_SIZE, width),
            nn.ReLU(),
            nn.Linear(width, features),
            nn.ReLU(),
        )

    def forward(self, profile: Tensor) -> Tensor:
        features: Tensor = self.encoder(profile)
        return features


class Classifier(nn.Module):
    """From both towers' features, each `(N, features)`, and profiles to logits `(N, 10)`."""

    def __init__(self, features: int = 64, width: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        self.decide = nn.Sequential(
            nn.Linear(2 * features + PROFILE_SIZE, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, image_features: Tensor, profile_features: Tensor, profile: Tensor) -> Tensor:
        logits: Tensor = self.decide(torch.cat([image_features, profile_features, profile], dim=1))
        return logits


class Digits(Dataset[Item]):
    """Images with their profiles, and the digits that they show.

    Each item is `({"image": (1, 8, 8) float32, "profile": (16,) float32}, class, a scalar int64)`,
    with all numbers between 0 and 1.
    """

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images = images
        self.profiles = torch.cat([images.mean(dim=3), images.mean(dim=2)], dim=2).squeeze(1)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> Item:
        inputs = {"image": self.images[index], "profile": self.profiles[index]}
        return inputs, self.classes[index]


def dataset(split: str) -> Digits:
    """Return one split of the digits in rpcmp.examples.digits, "train" or "test"."""
    return Digits(*digits.dataset(split).tensors)
