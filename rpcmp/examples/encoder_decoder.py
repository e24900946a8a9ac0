"""An LSTM encoder, an LSTM decoder and a classifier: which package is a passage of Python from?

The passages are real: 32 words and signs each, out of Python's own standard library, which is on
every machine that has Python, so nothing is downloaded. The encoder hands the decoder what it read
at each place and its own last state; what the decoder makes of each place is averaged and judged.

    words --> Encoder --(read, (h, c))--> Decoder --> Classifier --> logits, one a package

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
VOCABULARY = 4096  # a word is a number below it: its checksum, so that no list is needed
PASSAGES = 1000  # at most so many of a package, evenly spread, so that none outweighs the others
TEST_EVERY = 5  # each fifth passage is of the test split

Read = tuple[Tensor, tuple[Tensor, Tensor]]
"""What an LSTM returns: at each place `(N, T, width)`, and its last state, two of
`(1, N, width)`, all float32."""


class Encoder(nn.Module):
    """From words `(N, T)` int64 to what was read."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, words: Tensor) -> Read:
        read: Read = self.lstm(self.words(words))
        return read


class Decoder(nn.Module):
    """From what was read to vectors `(N, T, width)`; goes on from the encoder's last state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, read: Read) -> Tensor:
        at_each_place, state = read
        vectors: Tensor = self.lstm(at_each_place, state)[0]
        return vectors


class Classifier(nn.Module):
    """From vectors `(N, T, width)`, averaged over the places, to logits `(N, len(PACKAGES))`."""

    def __init__(self, width: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.decide = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, len(PACKAGES)))

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.decide(vectors.mean(dim=1))
        return logits


def dataset(split: str) -> TensorDataset:
    """The passages of one split, "train" or "test".

    Each item is the words of a passage, `(LENGTH,)` int64, and which of the PACKAGES it is from, a
    scalar int64.
    """
    words, packages = passages()
    is_test = torch.arange(len(packages)) % TEST_EVERY == 0
    chosen = {"train": ~is_test, "test": is_test}
    if split not in chosen:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(chosen)}")
    return TensorDataset(words[chosen[split]], packages[chosen[split]])


@cache
def passages() -> tuple[Tensor, Tensor]:
    """All passages `(P, LENGTH)` and the package of each `(P,)`, int64."""
    words, packages = [], []
    for index, package in enumerate(PACKAGES):
        found = torch.tensor(numbers(text_of(package)))
        whole = found[: len(found) // LENGTH * LENGTH].view(-1, LENGTH)
        chosen = whole[torch.linspace(0, len(whole) - 1, min(PASSAGES, len(whole))).long()]
        words.append(chosen)
        packages.append(torch.full((len(chosen),), index))
    return torch.cat(words), torch.cat(packages)


def text_of(package: str) -> str:
    """The source of a package of the standard library."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise FileNotFoundError(f"this Python has no source of its package {package} in {folder}")
    return "\n".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)


def numbers(text: str) -> list[int]:
    """Each word and each sign of the text as a number below VOCABULARY."""
    return [zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\w+|[^\w\s]", text)]
