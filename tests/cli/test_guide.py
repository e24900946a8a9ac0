"""`rpcmp guide`: the list of topics, a page, a search, and misspelt names."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from rpcmp.cli import cli
from rpcmp.cli.guide import FOLDER, pages, rendered, search
from tests.support.processes import Result, rpcmp

PAGE = """# Title

A high-level phrase over two
lines.

## Options

```sh
# Options of the shell
rpcmp drive config.toml
```

Options again, see [the other](replicas.md#gains), [a file](../x.py) and [a site](https://a.b).
"""


def guide(*arguments: str) -> Result:
    return rpcmp("guide", *arguments)


def test_guide_without_a_topic_lists_each_with_its_first_line() -> None:
    result = guide()
    assert result.code == 0
    for page in pages().values():
        assert re.search(rf"(?m)^  {page.topic} +{re.escape(page.summary)}$", result.out)
        assert re.search(rf"(?m)^{page.group}$", result.out)


@pytest.mark.parametrize("topic", pages())
def test_a_piped_page_is_printed_as_markdown(topic: str) -> None:
    result = guide(topic)
    assert (result.code, result.out) == (0, pages()[topic].path.read_text())


def test_every_page_of_the_folder_is_a_topic() -> None:
    listed = {page.path.name for page in pages().values() if page.path.parent == FOLDER}
    assert listed == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("topic", pages())
def test_every_page_can_be_rendered_for_a_narrow_terminal(topic: str) -> None:
    text = rendered(pages()[topic].text(), 60)
    plain = re.sub(r"\x1b\[[\d;]*m|\x1b\]8;.*?\x1b\\", "", text)
    assert max(map(len, plain.splitlines())) <= 60
    assert "](" not in plain
    assert "…" not in plain  # how rich cuts words off
    assert "<!--" not in plain


def test_links_to_pages_become_commands_and_links_to_files_text() -> None:
    plain = re.sub(r"\x1b\[[\d;]*m|\x1b\]8;.*?\x1b\\", "", rendered(PAGE, 100))
    assert "see the other (rpcmp guide replicas), a file and a site" in plain


def test_a_picture_becomes_its_description() -> None:
    shown = rendered("![Three stages in a row](../../.github/assets/overview.svg)\n", 100)
    assert plain(shown) == "Picture: Three stages in a row"


def plain(text: str) -> str:
    """Return rendered text without colours, with its lines joined."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())


def test_a_table_that_is_too_wide_becomes_a_list() -> None:
    table = "| key | type | meaning |\n| --- | --- | --- |\n| `a_key` | | a number |\n"
    assert plain(rendered(table, 20)) == "• a_key: meaning: a number"
    assert plain(rendered(table, 60)).startswith("key type meaning ─")


def test_a_search_finds_phrases_over_the_end_of_a_line_in_any_case() -> None:
    assert [*search("two LINES", PAGE)] == [
        ("Title", "A high-level phrase over two"),
        ("Title", "lines."),
    ]
    assert len([*search("high level", PAGE)]) == 1
    assert {match.heading for match in search("options", PAGE)} == {"Options"}  # not the comment


def test_a_search_prints_lines_with_topic_and_heading() -> None:
    result = guide("--search", "GradScaler")
    assert result.code == 0
    assert "precision: Loss scaling\n" in result.out
    assert "\nmodels: Moving from other APIs\n" in f"\n{result.out}"
    alone = guide("precision", "--search", "gradscaler")
    assert "models:" not in alone.out
    assert len(alone.out) < len(result.out)


def test_a_search_without_a_match_exits_with_1() -> None:
    assert guide("--search", "zebra crossing").code == 1
    result = guide("replicas", "--search", "zebra")
    assert (result.code, result.out) == (1, "")
    assert "the page 'replicas' does not contain 'zebra'" in result.err
    assert guide("--search", " ").code == 2


def test_a_misspelt_topic_suggests_the_nearest() -> None:
    result = guide("optimiser")
    assert result.code == 2
    assert "no topic 'optimiser'; did you mean 'optimizers'?" in result.err
    assert "did you mean" not in guide("qqq").err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tensorboard", "; see 'runs'"),
        ("certificates", "; see 'hosts'"),
        ("metrics", "; see 'evaluation' or 'prometheus'"),
        ("config", "; see 'configuration'"),
    ],
)
def test_an_unknown_topic_lists_the_pages_that_mention_it(word: str, expected: str) -> None:
    assert expected in guide(word).err


def test_a_shell_completes_topics() -> None:
    complete = ShellComplete(cli, {}, "rpcmp", "_RPCMP_COMPLETE").get_completions
    found = complete(["guide"], "p")
    assert [item.value for item in found] == [topic for topic in pages() if topic.startswith("p")]
    assert all(item.help for item in found)
    assert len(complete(["guide"], "")) == len(pages())


def test_nothing_is_rendered_without_a_terminal() -> None:
    """Importing rich and Pygments takes longer than everything else."""
    code = "import sys, rpcmp.cli.guide as g; g.guide(['data'], standalone_mode=False)"
    check = "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'torch', 'pydantic')])"
    command = [sys.executable, "-c", f"{code}; {check}"]
    output = subprocess.check_output(command, text=True, timeout=60)
    assert output.endswith("\n[]\n")


def test_on_a_terminal_a_page_is_rendered_and_paged(tmp_path: Path) -> None:
    """The user's pager here writes its input to a file."""
    output = tmp_path / "paged"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {output}\n")
    pager.chmod(0o755)
    script = Path(sysconfig.get_path("scripts")) / "rpcmp"
    environment = {**os.environ, "PAGER": str(pager), "TERM": "xterm-256color", "COLUMNS": "80"}
    terminal, end = pty.openpty()
    try:
        subprocess.run(
            [script, "guide", "replicas"],
            stdin=end,
            stdout=end,
            env=environment,
            check=True,
            timeout=60,
        )
    finally:
        os.close(terminal)
        os.close(end)
    text = output.read_text()
    assert "On several hosts" in text
    assert "## On several hosts" not in text
