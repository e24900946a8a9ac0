"""A comparison as tables of text, for a terminal as for a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rpcmp import sizes
from rpcmp.runfolder.compare import Comparison, Row


@dataclass(frozen=True)
class Table:
    """Attributes:
    title: what its rows are.
    rows: a name, and a text for each run.
    """

    title: str
    rows: list[tuple[str, list[str]]]


def tables(found: Comparison) -> Iterator[Table]:
    """How the runs went; of several also which settings and losses differ."""
    yield Table("Figures", [_figure(row) for row in found.figures])
    if len(found.names) > 1:
        yield Table("Settings that differ", [(name, _texts(each)) for name, each in found.settings])
        losses = [(f"step {step:,}", _losses(each)) for step, each in found.losses]
        yield Table("Loss", losses)


def _figure(row: Row) -> tuple[str, list[str]]:
    name, values = row
    return name, ["-" if value is None else _in_unit(name, value) for value in values]


def _in_unit(name: str, value: Any) -> str:
    match name.split():
        case ["step", "time"]:
            return f"{value * 1e3:,.1f} ms"
        case ["whole", "time"]:
            return f"{value:,.1f} s"
        case ["samples/s"]:
            return f"{value:,.0f}"
        case ["busy" | "bubble", *_] | ["data", "share"]:
            return f"{value:.0%}"
        case ["peak", "memory", *_]:
            return sizes.show(value)
    return _text(value)


def _texts(values: Iterable[Any]) -> list[str]:
    return ["-" if value is None else _text(value) for value in values]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _losses(values: Iterable[float | None]) -> list[str]:
    """All digits, since the last ones are what is compared."""
    return ["not finite" if value is None else repr(value) for value in values]
