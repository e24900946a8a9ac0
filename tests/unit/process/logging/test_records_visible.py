"""The escaping of untrusted text, so that it does not control a terminal."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from rpcmp.cli.console import Console
from rpcmp.process.logging.records import visible

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\x00\x7f"
SHOWN = r"x\x1b]0;owned\x07\x9b31m\u202eevil\x00\x7f"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Zürich → 東京\tand\nmore", "plain, Zürich → 東京\tand\nmore"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2K\x1b[1Aback", "back"),
        ("\x1b[\x1b[31m31mred", r"\x1b[31mred"),
        ("10%\r20%\r\n", "10%\n20%\n"),
        ("\x1b]8;;http://evil\x1b\\click", "\\x1b]8;;http://evil\\x1b\\click"),
        ("\u2066a\u2069", r"\u2066a\u2069"),
        ("\udc80", r"\udc80"),
        (HOSTILE, SHOWN),
    ],
)
def test_visible_escapes_control_characters(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_tables_have_no_markup_or_controls_except_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=200)
    table = Table("head", header_style="bold")
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    table.add_row("[link=http://evil]go[/link] :smile:")
    console.print(table)
    output = out.getvalue()
    assert output.count(SHOWN) == 1
    assert r"x\x1b]0;owned" in output.split("\x1b[31m")[1]  # the Text, in its style's colour
    assert "[link=http://evil]go[/link] :smile:" in output
    assert not [one for one in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07") if one in output]
