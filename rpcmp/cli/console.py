"""Tables and progress bars on a terminal, made of texts that are made visible first.

Commands import this module when they print a table: `rpcmp --help` needs no rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rpcmp.process.logging.records import visible


class Console(rich.console.Console):
    """A rich console for untrusted text: without markup, and without control characters.

    Colours that rpcmp gives by styles stay.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make text visible before it is measured, so that columns fit."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make all other text visible, such as a `Text` object's."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, as for a progress bar
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


Cell = str | tuple[str, str]
"""A text, or a text and its style."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    right: Iterable[str] = (),
    pad_edge: bool = True,
) -> Table:
    """Return a table without lines, and without a header if all heads are empty.

    Args:
        right: heads of columns that are aligned right.
        pad_edge: whether to pad the outermost columns.
    """
    made = Table(box=None, header_style="bold", pad_edge=pad_edge, show_header=any(heads))
    for head in heads:
        justify = "right" if head in right else "left"
        made.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(Text(*cell) if isinstance(cell, tuple) else cell for cell in row))
    return made


def print_wide(made: Table, width: int) -> None:
    """Print a table of at least `width` characters.

    A narrower terminal wraps lines, which are more legible than cells that rich folds.
    """
    Console(width=max(Console().width, width)).print(made)
