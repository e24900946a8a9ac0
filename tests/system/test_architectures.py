"""Models of transformers, of each kind, as their authors wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import rpcmp
from tests.zoo import architectures

SHORT = ("t5",)
"""An encoder and a decoder, whose embedding is in three places by three names."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long)
        for name in architectures.ARCHITECTURES
    ],
)
def test_a_model_gives_its_own_bits(name: str, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(architectures.job(name, 4, "zero-bubble"))
    result = rpcmp("verify", config, "--steps", "3")
    assert result.code == 0, result.err
    assert "identical: 3 losses" in result.out
