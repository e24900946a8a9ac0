"""A feature extractor and a classifier, each with its own optimizer.

Many training loops split such a model by hand, with `features.to("cuda:0")` and
`classifier.to("cuda:1")`, and step two optimizers one after the other. Here each module is a stage,
and neither knows where the other runs.
"""

from torch import Tensor, nn

NUM_CLASSES = 10


class Features(nn.Module):
    """From images `(N, 1, 8, 8)` to features `(N, 8 * width)`, all float32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),  # (N, width, 4, 4)
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2),  # (N, 2 * width, 2, 2)
            nn.Flatten(),
        )

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.convolutions(images)
        return features


class Classifier(nn.Module):
    """From features `(N, 8 * width)` to logits `(N, 10)`, all float32."""

    def __init__(self, width: int = 32, hidden: int = 128, dropout: float = 0.3) -> None:
        super().__init__()
        self.decide = nn.Sequential(
            nn.Linear(8 * width, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.decide(features)
        return logits
