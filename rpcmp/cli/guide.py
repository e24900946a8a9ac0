"""`rpcmp guide`: the pages of rpcmp/guide in the terminal.

The list of topics is rpcmp/guide/README.md, which also is what a browser shows for that folder.
"""

from __future__ import annotations

import io
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from rpcmp.cli import echo
from rpcmp.errors import ConfigError, did_you_mean, nearest

FOLDER = Path(__file__).parents[1] / "guide"

WIDTH = 100
"""Most columns of a rendered page: longer lines are hard to read."""

SUGGESTED = 3
"""Most topics that an error suggests."""

_HEADING = re.compile(r"#+ (.*)")
_LINK = re.compile(r"!?\[([^\]]+)\]\(([^)\s]+)\)")
_TABLE = re.compile(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n?)+", re.MULTILINE)
_ROW = re.compile(r"- \[([\w-]+)\]\(([\w./-]+\.md)\): (.+)")


class GuidePage(NamedTuple):
    """A page of the guide; `group` is the heading that it is listed under."""

    topic: str
    summary: str
    path: Path
    group: str

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


class Match(NamedTuple):
    """A line of a page, and the heading that it stands under."""

    heading: str
    line: str


def pages() -> dict[str, GuidePage]:
    """Return all pages by topic, in the order of the list of topics."""
    found: dict[str, GuidePage] = {}
    group = ""
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := _HEADING.fullmatch(line):
            group = heading[1]
        elif row := _ROW.fullmatch(line):
            topic, target, summary = row.groups()
            found[topic] = GuidePage(topic, summary, FOLDER / target, group)
    return found


def search(word: str, text: str) -> Iterator[Match]:
    """Find the lines of a page that contain `word`, in any case.

    A space of `word` also matches a hyphen and the end of a line: "learning rate" finds
    "learning-rate", and a phrase wherever the page wraps it.
    """
    pattern = re.compile(r"[\s-]+".join(map(re.escape, word.split())), re.IGNORECASE)
    matching = {
        line
        for match in pattern.finditer(text)
        for line in range(text.count("\n", 0, match.start()), text.count("\n", 0, match.end()) + 1)
    }
    heading, is_code = "", False
    for number, line in enumerate(text.splitlines()):
        is_code ^= line.startswith("```")
        if not is_code and (title := _HEADING.fullmatch(line)):
            heading = title[1]
        if number in matching:
            yield Match(heading, line.strip())


def _topics(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    return [
        CompletionItem(page.topic, help=page.summary)
        for page in pages().values()
        if page.topic.startswith(incomplete)
    ]


@click.command()
@click.argument("topic", required=False, shell_complete=_topics)
@click.option("--search", "word", metavar="WORD", help="Show the lines that contain WORD instead.")
def guide(topic: str | None, word: str | None) -> None:
    """Read the guide's page about TOPIC, or list its topics.

    On a terminal the page is rendered and paged; elsewhere it is Markdown. --search looks in all
    pages, or in the one that is named, and exits with 1 if WORD is in none of them.

    \b
    Examples:
      rpcmp guide
      rpcmp guide checkpoints
      rpcmp guide --search "learning rate"
    """
    by_topic = pages()
    if topic is not None and topic not in by_topic:
        raise ConfigError(
            f"the guide has no topic {topic!r}{_instead(topic, by_topic)} (`rpcmp guide` lists the "
            "topics, `rpcmp guide --search WORD` looks in all of them)"
        )
    chosen = list(by_topic.values()) if topic is None else [by_topic[topic]]
    if word is not None:
        _show_matches(word, chosen)
    elif topic is None:
        _show_topics(chosen)
    elif sys.stdout.isatty():
        columns = min(shutil.get_terminal_size().columns, WIDTH)
        click.echo_via_pager(rendered(chosen[0].text(), columns))
    else:
        echo(chosen[0].text(), nl=False)


def _instead(topic: str, by_topic: dict[str, GuidePage]) -> str:
    """Return the end of an error that suggests a topic: by its name, or by its headings."""
    if near := nearest(topic, by_topic, cutoff=0.7):
        return did_you_mean(near)
    about = []
    for page in by_topic.values():
        headings = "\n".join(match.heading for match in search("#", page.text()))
        if topic.lower() in f"{page.summary}\n{headings}".lower():
            about.append(page.topic)
    if about:
        return f"; see {' or '.join(map(repr, about[:SUGGESTED]))}"
    return did_you_mean(nearest(topic, by_topic))


def _show_topics(listed: list[GuidePage]) -> None:
    width = max(len(page.topic) for page in listed)
    for number, (group, members) in enumerate(itertools.groupby(listed, lambda page: page.group)):
        echo(f"{chr(10) if number else ''}{group}")
        for page in members:
            echo(f"  {page.topic:{width}}  {page.summary}")
    echo("\nrpcmp guide TOPIC shows one, rpcmp guide --search WORD looks in all of them")


def _show_matches(word: str, chosen: list[GuidePage]) -> None:
    if not word.strip():
        raise click.UsageError("--search needs a word to look for")
    count = 0
    for page in chosen:
        heading = None
        for match in search(word, page.text()):
            if match.heading != heading:
                echo(f"{chr(10) if count else ''}{page.topic}: {match.heading}")
                heading = match.heading
            echo(f"  {match.line}")
            count += 1
    if not count:
        where = f"the page {chosen[0].topic!r}" if len(chosen) == 1 else "the guide"
        raise click.ClickException(f"{where} does not contain {word!r}")


def rendered(text: str, columns: int) -> str:
    """Render a page's Markdown for a terminal.

    Links to other pages become commands; those to files of the repository become plain text, and so
    do pictures.
    """
    from rich.markdown import Markdown  # also imports Pygments: only if a page is rendered

    from rpcmp.cli.console import Console

    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=columns)
    linked = _LINK.sub(_as_command, text)
    console.print(Markdown(_TABLE.sub(lambda table: _fitting(table[0], columns), linked)))
    return output.getvalue()


def _fitting(table: str, columns: int) -> str:
    """Return a table that is too wide for the terminal as a list: rich would cut its words."""
    header, _, *rows = (
        [cell.strip() for cell in row[1:-1].split("|")] for row in table.split("\n") if row
    )
    widths = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    if sum(width + 3 for width in widths) <= columns:
        return table
    labels = [f"*{name}*: " if name and len(header) > 2 else "" for name in header]
    items = []
    for first, *others in rows:
        cells = (label + cell for label, cell in zip(labels[1:], others, strict=True) if cell)
        items.append(f"- {first}: {'; '.join(cells)}\n")
    return "".join(items)


def _as_command(link: re.Match[str]) -> str:
    text, target = link.groups()
    if "://" in target:
        return link[0]
    if link[0].startswith("!"):
        return f"*Picture: {text}*"
    name = Path(target.partition("#")[0]).name
    known = {page.path.name: page.topic for page in pages().values() if page.path.parent == FOLDER}
    topic = known.get(name, "")
    return text if not topic or "rpcmp guide" in text else f"{text} (`rpcmp guide {topic}`)"
