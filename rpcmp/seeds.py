"""Where every random number of a run comes from.

One `seed` rules everything. Each use derives its own stream from the seed and from what the
number is for: (seed, "init", layer) for parameters, (seed, "train", step, micro-batch, layer)
for dropout, (seed, "epoch", epoch) for shuffling. None of these depends on where the model is cut,
on the schedule or on which host draws from it, so none of these change a run's bits. What a stage's
optimizer draws, some add noise, comes from (seed, "optimizer", step, stage).
"""

from __future__ import annotations

import hashlib
import random

import numpy.random  # torch loads numpy, but this of it not before it is used: then in every fork
import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from `parts`: equal parts give equal seeds on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed every generator that a model may draw from: torch's, Python's and numpy's."""
    seed = derive(*parts)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
