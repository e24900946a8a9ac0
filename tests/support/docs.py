"""Pages of Markdown: their code blocks, sections, headings, and the commands in them."""

from __future__ import annotations

import re

from tests.support.places import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in (
        *("README.md", "CHANGELOG.md", ".github/*.md", "deploy/*.md", "rpcmp/guide/*.md"),
        *("rpcmp/examples/*.md", "tests/*.md", "tests/benchmarks/*.md"),
    )
    for path in sorted(ROOT.glob(pattern))
}
"""Every page, by its path."""

README = PAGES["README.md"]


def guide(topic: str) -> str:
    """Return a page of rpcmp/guide."""
    return PAGES[f"rpcmp/guide/{topic}.md"]


def blocks(language: str, text: str = README) -> list[str]:
    """Return the code blocks in that language."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def without_blocks(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def block(language: str, starts_with: str, text: str = README) -> str:
    """Return the code block with that language and first line."""
    return next(found for found in blocks(language, text) if found.startswith(starts_with))


def section(title: str, text: str = README) -> list[str]:
    """Return the shell blocks below a heading, up to the next heading of the same rank."""
    (heading,) = re.findall(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    _, _, after = text.partition(f"\n{heading} {title}\n")
    return blocks("sh", re.split(rf"^{heading} ", after, maxsplit=1, flags=re.MULTILINE)[0])


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return [
        markdown or html
        for markdown, html in re.findall(
            r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", without_blocks(text)
        )
    ]


def in_sentences(text: str) -> list[str]:
    """Return every command within a sentence or a table, such as `rpcmp new NAME`."""
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(text)))
    found = (re.search(r"\brpcmp [^)>]+", span) for span in spans)
    return list(dict.fromkeys(command[0].strip() for command in found if command))


def commands_of(block: str) -> list[str]:
    """Return the lines of a shell block with their comments, continued lines as one."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def commands(blocks: list[str]) -> list[str]:
    """Return every command of some shell blocks, each once, without its comment."""
    lines = [line for block in blocks for line in commands_of(block)]
    bare = [re.sub(r"(^|\s+)#.*", "", line) for line in lines]
    parts = [part.split() for line in bare if line for part in line.split(" && ")]
    return list(dict.fromkeys(" ".join(part) for part in parts))
