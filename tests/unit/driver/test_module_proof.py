"""How much of a module this host compares with its layers: all, on fewer tokens, or its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rpcmp.config.loader import parse_config
from rpcmp.driver import module_proof
from rpcmp.driver.module_proof import first_tokens, is_quick, prove_cut
from rpcmp.errors import ConfigError
from rpcmp.splitting.recording import Shape, recorded
from rpcmp.splitting.split import split_module
from tests.zoo import surprises

TOKENS = torch.ones(3, 100, dtype=torch.long)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 4)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = self.embed(tokens) * weights[:, :, None]
        return found


class Fixed(nn.Module):
    """What is for one length only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(100))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.table


class Long(Tokens):
    """What does something else with short sequences, which a guard of its cut tells."""

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, weights) * (2 if tokens.shape[1] > 50 else 1)


def test_all_sequences_of_a_batch_are_shortened_alike() -> None:
    batch = {"tokens": TOKENS, "weights": torch.ones(3, 100)}
    short = first_tokens(batch, split_module(Tokens(), batch), 24)
    assert {name: each.shape for name, each in short.items()} == {
        "tokens": (3, 24),
        "weights": (3, 24),
    }


def test_what_a_cut_is_not_for_is_not_shortened() -> None:
    assert first_tokens(TOKENS, split_module(Fixed(), TOKENS), 24) is TOKENS
    batch = (TOKENS, torch.ones(3, 100))
    assert first_tokens(batch, split_module(Long(), batch), 24) is batch
    images = torch.ones(3, 100)
    assert first_tokens(images, split_module(nn.Linear(100, 1), images), 24) is images


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> Shape:
    return Shape(dtype, sizes, (True,) * len(sizes))


def test_a_proof_is_long_for_many_parameters_or_many_tokens() -> None:
    with torch.device("meta"):
        small, large = nn.Linear(1000, 1000), nn.Linear(20_000, 20_000)
    assert is_quick(small, [shape(8, 100_000, 1000)])
    assert is_quick(large, [shape(3, 24, 20_000)])
    assert is_quick(large, [shape(72, 20_000)])
    assert not is_quick(large, [shape(3, 2048, 20_000)])
    assert not is_quick(large, [shape(3, 2048, dtype=torch.long)])


@pytest.mark.parametrize("has_memory", [True, False])
def test_without_memory_for_all_its_parts_are_compared(
    monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    config = parse_config(
        {
            "loss": "torch.nn:MSELoss",
            "model": {"module": "tests.zoo.surprises:Net", "kwargs": {"kind": "scaled"}},
            "data": {"train": "tests.zoo.surprises:pairs", "batch_size": 8},
        }
    )
    net, samples = surprises.Net("scaled"), [torch.ones(3, 4, dtype=torch.float64)] * 2
    with recorded(net) as recording:
        split = split_module(net, samples[0])
    has = {"has_memory_for": lambda part: has_memory or part is not net}
    monkeypatch.setattr(module_proof, "has_memory_for", has["has_memory_for"])
    where = "gradient of 'blocks" if has_memory else r"'blocks.1' \(Block\) computes"
    with pytest.raises(ConfigError, match=where):
        prove_cut(config, net, split, recording, samples, 20.0)
