"""An LSTM encoder, an LSTM decoder and a classifier of passages of Python by their package.

Each passage is 32 words and signs of Python's own standard library, which is on every machine that
has Python, so nothing is downloaded. The encoder passes its outputs and its last state to the
decoder, whose outputs are averaged and classified.

    words --> Encoder --(outputs, (h, c))--> Decoder --> Classifier --> logits, one per package

A stage may return any tree of tensors, here a tuple in a tuple.
"""

import re
import sysconfig
import zlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest")
LENGTH = 32  # words and signs in a passage
VOCABULARY = 4096  # words become numbers below it by their checksums, so that no list is needed
PASSAGES = 1000  # most passages of a package, evenly spread, so that none outweighs the others
TEST_EVERY = 5  # every fifth passage is in the test split

LstmOutput = tuple[Tensor, tuple[Tensor, Tensor]]
"""Outputs `(N, T, width)` and the last state, two tensors `(1, N, width)`, all float32."""


class Encoder(nn.Module):
    """From words `(N, T)` int64 to an LSTM's output."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, words: Tensor) -> LstmOutput:
        output: LstmOutput = self.lstm(self.words(words))
        return output


class Decoder(nn.Module):
    """From the encoder's output to vectors `(N, T, width)`; starts in the encoder's last state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, encoded: LstmOutput) -> Tensor:
        outputs, state = encoded
        vectors: Tensor = self.lstm(outputs, state)[0]
        return vectors


class Classifier(nn.Module):
    """From vectors `(N, T, width)`, averaged over T, to logits `(N, len(PACKAGES))`."""

    def __init__(self, width: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.decide = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, len(PACKAGES)))

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.decide(vectors.mean(dim=1))
        return logits


def dataset(split: str) -> TensorDataset:
    """Return the passages of one split, "train" or "test".

    Each item is the words of a passage, `(LENGTH,)` int64, and the index of its package in
    PACKAGES, a scalar int64.
    """
    words, packages = passages()
    is_test = torch.arange(len(packages)) % TEST_EVERY == 0
    chosen = {"train": ~is_test, "test": is_test}
    if split not in chosen:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(chosen)}")
    return TensorDataset(words[chosen[split]], packages[chosen[split]])


@cache
def passages() -> tuple[Tensor, Tensor]:
    """Return all passages `(P, LENGTH)` and the package of each `(P,)`, int64."""
    words, packages = [], []
    for index, package in enumerate(PACKAGES):
        stream = torch.tensor(numbers(text_of(package)))
        whole = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
        chosen = whole[torch.linspace(0, len(whole) - 1, min(PASSAGES, len(whole))).long()]
        words.append(chosen)
        packages.append(torch.full((len(chosen),), index))
    return torch.cat(words), torch.cat(packages)


def text_of(package: str) -> str:
    """Return the source of a package of the standard library."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise FileNotFoundError(f"this Python has no source of its package {package} in {folder}")
    return "\n".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)


def numbers(text: str) -> list[int]:
    """Turn each word and each sign of the text into a number below VOCABULARY."""
    return [zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\w+|[^\w\s]", text)]
