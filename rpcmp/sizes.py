"""Sizes of memory as people write them: "8 GiB"."""

from __future__ import annotations

import re

from rpcmp.errors import ConfigError

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
"""Bytes of each unit."""


def parse(text: str) -> int:
    """Bytes of "8 GiB" or "1.5 GB".

    Raises:
        ConfigError: it is no number and unit, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    size = int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        raise ConfigError(f'{text!r} is no size; write one like "8 GiB" ({", ".join(UNITS)})')
    return size


def show(size: int) -> str:
    """`size` bytes with a binary unit that leaves few digits, "1.5 GiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[unit]), "B")
    return f"{size / UNITS[unit]:,.1f} {unit}" if unit != "B" else f"{size} B"
