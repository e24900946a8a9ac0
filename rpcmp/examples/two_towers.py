"""Handwritten digits read twice, by two encoders side by side, and judged together.

One tower sees the image, the other only its profile: how much ink there is in each row and column.
A classifier joins what they found, and takes the profile itself as well. The stages form no chain
but a graph, in which the towers work at the same time and the skip reaches the classifier directly:

    image ----> ImageTower ------+
                                 +--> Classifier --> logits
    profile -+> ProfileTower ----+
             |                   |
             +-------------------+

Each class is one stage. The configuration names it, sets its arguments, and says what it reads.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_CLASSES = 10
PROFILE_SIZE = 16  # 8 rows and 8 columns
NUM_TRAINING_IMAGES = 1437  # 80 % of 1,797; the others are the test split
SPLIT_SEED = 0

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
    """Images with their profiles, and what digits they show.

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
    """The digits that ship with scikit-learn, one split of them: "train" or "test"."""
    images, classes = load_digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(SPLIT_SEED))
    chosen = {"train": order[:NUM_TRAINING_IMAGES], "test": order[NUM_TRAINING_IMAGES:]}
    if split not in chosen:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(chosen)}")
    return Digits(images[chosen[split]], classes[chosen[split]])


def load_digits() -> tuple[Tensor, Tensor]:
    """All images `(1797, 1, 8, 8)` float32 between 0 and 1, and classes `(1797,)` int64."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'rpcmp[examples]'"
        ) from error
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels: 0 to 16
    return images, torch.tensor(digits.target, dtype=torch.int64)
