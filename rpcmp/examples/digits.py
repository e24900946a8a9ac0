"""A small convolutional network that reads handwritten digits.

The data are the 1,797 images that ship with scikit-learn, 8 x 8 pixels each, so nothing is
downloaded and a run takes seconds. The model is a list of named layers, some with dropout or batch
normalization, that may be cut into stages anywhere; copy it for your own.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10
NUM_TRAINING_IMAGES = 1437  # 80 % of 1,797; the others are the test split
SPLIT_SEED = 0


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a block from images `(N, in_channels, H, W)` to `(N, out_channels, H, W)`, float32."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def pooled(block: nn.Sequential) -> nn.Sequential:
    """Halve the height and width of the output of `block`."""
    return nn.Sequential(*block, nn.MaxPool2d(kernel_size=2))


def hidden_block(in_features: int, out_features: int, dropout: float) -> nn.Sequential:
    """Return a block from feature maps of `in_features` numbers to `(N, out_features)`, float32."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_features, out_features),
        nn.ReLU(),
        nn.Dropout(dropout),
    )


def layers(width: int = 32, dropout: float = 0.3) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the model's layers in order, each a name and a factory.

    A stage calls the factories of its own layers only. Initial weights and checkpoints go by a
    layer's name, so they do not depend on where the model is cut.

    Input: images `(N, 1, 8, 8)` float32. Output: logits `(N, 10)` float32.
    """
    return [
        ("conv1", lambda: conv_block(1, width)),
        ("conv2", lambda: pooled(conv_block(width, width))),  # (N, width, 4, 4)
        ("conv3", lambda: conv_block(width, 2 * width)),
        ("conv4", lambda: pooled(conv_block(2 * width, 2 * width))),  # (N, 2 * width, 2, 2)
        ("hidden", lambda: hidden_block(8 * width, 4 * width, dropout)),
        ("head", lambda: nn.Linear(4 * width, NUM_CLASSES)),
    ]


def dataset(split: str) -> TensorDataset:
    """Return the digits of one split, "train" or "test".

    Each item is an image `(1, 8, 8)` float32 between 0 and 1, and its class, a scalar int64.
    """
    images, classes = load_digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(SPLIT_SEED))
    chosen = {"train": order[:NUM_TRAINING_IMAGES], "test": order[NUM_TRAINING_IMAGES:]}
    if split not in chosen:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(chosen)}")
    return TensorDataset(images[chosen[split]], classes[chosen[split]])


def load_digits() -> tuple[Tensor, Tensor]:
    """Return all images `(1797, 1, 8, 8)` float32 between 0 and 1, and classes `(1797,)` int64.

    Reads the file of `sklearn.datasets.load_digits`, since importing scikit-learn takes a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ImportError("the digits come with scikit-learn: pip install 'rpcmp[examples]'")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(file, delimiter=","))  # 64 pixels, 0 to 16, and the class
    images = rows[:, :-1].reshape(-1, 1, 8, 8).to(torch.float32) / 16
    return images, rows[:, -1].to(torch.int64)
