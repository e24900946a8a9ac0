"""Random numbers: one `seed` rules them all, and each use draws from a stream of its own.

A stream's seed is derived from the config's and the purpose:

    (seed, "init", layer)                        parameters; of a module that is cut: seed itself
    (seed, "train", step, micro-batch, layer)    dropout
    (seed, "epoch", epoch)                       shuffling
    (seed, "optimizer", step, stage)             what a stage's optimizer draws, some add noise

Only the last depends on where the model is cut. None depends on the schedule or on which host draws
from it, so these do not change a run's bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy.random  # torch loads numpy, but this of it not before it is used: then in every fork
import torch

from rpcmp.pipelining import devices


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from `parts`; equal parts give equal seeds on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed every generator that a model may draw from: torch's, Python's and numpy's."""
    seed_plainly(derive_seed(*parts))


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the generators of this process as they were before this block."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    on_devices = devices.accelerator_rng()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
        devices.set_accelerator_rng(on_devices)


def seed_plainly(seed: int) -> None:
    """Seed every generator with this number, as `torch.manual_seed` does torch's."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    devices.seed_accelerator(seed)
