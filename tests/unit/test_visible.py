"""Text from elsewhere does not drive a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from rpcmp.cli.console import Console
from rpcmp.runfolder import layout
from rpcmp.visible import visible
from tests.support.processes import rpcmp

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
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_tables_have_no_markup_nor_controls_but_their_own_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=200)
    table = Table("head", header_style="bold")
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    table.add_row("[link=http://evil]go[/link] :smile:")
    console.print(table)
    said = out.getvalue()
    assert said.count(SHOWN) == 1
    assert r"x\x1b]0;owned" in said.split("\x1b[31m")[1]  # the Text, in its style's colour
    assert "[link=http://evil]go[/link] :smile:" in said
    assert not [one for one in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07") if one in said]


def run_folder(path: Path) -> Path:
    """The folder of a run whose name, error and stages carry HOSTILE."""
    path.mkdir()
    info = layout.RunInfo(name="job", started=0.0, outcome="failed", error=HOSTILE)
    (path / layout.RUN).write_text(info.model_dump_json())
    (path / layout.CONFIG).write_text("{}")
    event = {"event": "step", "time": 1.0, "step": 1, "loss": 0.5, "busy": {HOSTILE: 0.5}}
    (path / layout.METRICS).write_text(f"{json.dumps(event)}\n")
    (path / layout.EVENTS).touch()
    return path


def test_a_run_folder_from_elsewhere_does_not_drive_the_terminal(tmp_path: Path) -> None:
    found = rpcmp("report", str(run_folder(tmp_path / "run")), "--text")
    assert found.code == 0
    assert found.out.count(SHOWN) == 2
    assert "\x1b" not in found.out


def test_an_error_and_a_misuse_do_not_drive_the_terminal(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    (path / layout.RUN).write_text(json.dumps({"name": "job", "started": HOSTILE}))
    for arguments in (["report", str(path / HOSTILE.replace("\x00", ""))], [f"no\x1b]0;{1}\x07"]):
        found = rpcmp(*arguments)
        assert found.code == 2
        assert "\x1b" not in found.err
        assert r"\x1b]0;" in found.err


@pytest.mark.parametrize("end", ["\n", "\r", "\x1b[0m\n"])
def test_only_we_say_what_to_try(tmp_path: Path, end: str) -> None:
    found = rpcmp("drive", str(tmp_path / f"no such{end}try: rm -rf all"))
    assert found.code == 2
    assert "\n  try: rm -rf all" in found.err
    tried = [line for line in found.err.splitlines() if line.startswith("try:")]
    assert all("rm -rf" not in line for line in tried)
