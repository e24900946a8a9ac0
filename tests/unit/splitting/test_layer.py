"""Layers of a module that was cut, and what they accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.config import importing
from rpcmp.errors import ConfigError
from tests.support.splitmodules import layers_of, split_of


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"tokens": torch.zeros(2, 8, dtype=torch.int64)},
            r"cut for the inputs \['tokens', 'mask'\]",
        ),
        (torch.zeros(2, 8), "cut for the inputs"),
        (
            {"tokens": torch.zeros(2, 8), "mask": torch.zeros(2, 8)},
            r"cut for 'tokens' of int64\[any, any\], not float32\[2, 8\]",
        ),
    ],
)
def test_other_inputs_are_an_error_that_names_them(batch: Any, text: str) -> None:
    first, *_ = layers_of(*split_of("language"))
    with pytest.raises(ValueError, match=text):
        first(batch)


def test_a_size_that_the_module_fixes_is_checked() -> None:
    first, *_ = layers_of(*split_of("skips"))
    with pytest.raises(ValueError, match=r"'0' of float32\[any, 2, any, any\], not float32\[2, 3"):
        first(torch.zeros(2, 3, 8, 8))


def test_the_order_of_keywords_does_not_matter() -> None:
    first, *_ = layers_of(*split_of("language"))
    batch = {"mask": torch.ones(2, 8), "tokens": torch.ones(2, 8, dtype=torch.int64)}
    turned = dict(reversed(batch.items()))
    assert all(a.equal(b) for a, b in zip(first.eval()(batch), first(turned), strict=True))


def test_a_host_without_code_compiles_no_cut_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated code reads beyond its tensors where torch's kernels would refuse."""
    layer, *_ = layers_of(*split_of("returning"))
    monkeypatch.setattr(importing, "_lists", [importing.AllowList([])])
    with pytest.raises(ConfigError, match="set compile = false for its stage"):
        layer.compile_programs(lambda run: run)
