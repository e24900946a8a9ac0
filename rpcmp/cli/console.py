"""Tables and progress bars on a terminal, whose texts have been made visible first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rpcmp.process.logging.records import visible


class Console(rich.console.Console):
    """A rich console for text from elsewhere: no markup, and no control characters in it.

    Colours that rpcmp gives by styles stay.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See Console: made visible before it is measured, so that columns fit."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See Console: whatever way a text has come, such as a Text of its own."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, for a progress bar
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
