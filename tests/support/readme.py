"""What stands in the README: blocks of code, sections, the commands that it tells to type."""

from __future__ import annotations

import re

from tests.support.places import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    """The blocks of code in that language."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def block(language: str, starts_with: str) -> str:
    """The block of that language and first line."""
    return next(text for text in blocks(language) if text.startswith(starts_with))


def section(title: str) -> list[str]:
    """The shell blocks below a heading, up to the next one of its rank."""
    (heading,) = re.findall(rf"^(#+) {re.escape(title)}$", README, re.MULTILINE)
    _, _, after = README.partition(f"\n{heading} {title}\n")
    return blocks("sh", re.split(rf"^{heading} ", after, maxsplit=1, flags=re.MULTILINE)[0])


def in_sentences() -> list[str]:
    """Every command that stands within a sentence or a table, such as `rpcmp new NAME`."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    found = (re.search(r"\brpcmp [^)>\"]+", span) for span in spans)
    return list(dict.fromkeys(command[0].strip() for command in found if command))


def commands_of(block: str) -> list[str]:
    """The lines of a shell block, with their comments; those that go on below are one."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def commands(blocks: list[str]) -> list[str]:
    """Every command of some shell blocks, each once, without its comment."""
    lines = [line for block in blocks for line in commands_of(block)]
    bare = [re.sub(r"\s+#.*", "", line) for line in lines]
    parts = [part.split() for line in bare for part in line.split(" && ")]
    return list(dict.fromkeys(" ".join(part) for part in parts))
