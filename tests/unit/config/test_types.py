"""Sizes of memory, read and shown."""

from __future__ import annotations

import pytest

from rpcmp.config.types import format_size, parse_size
from rpcmp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("8 GiB", 8 * 2**30), ("1.5GB", 1_500_000_000), ("512 B", 512), ("2 kB", 2000)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8 gigs",
        "GiB",
        "-1 GiB",
        "0 B",
        "8 GiB or so",
        "1e9 B",
        "9" * 310 + " GiB",
        "9" * 400 + " XiB",
    ],
)
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match='write one such as "8 GiB"'):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes_are_shown_with_few_digits(size: int, text: str) -> None:
    assert format_size(size) == text
