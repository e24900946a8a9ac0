"""The diagram of a training step in the docstring of rpcmp.worker.stage, compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

from rpcmp.worker import stage
from tests.support.places import PACKAGE

CITATION = re.compile(r"# (?:stage\.py )?\[(\d+)\]")
NUMBER = re.compile(r"\[(\d+)\]")

PASSED_THROUGH = ("driver/stage_group.py", "rpc/messages.py", "rpc/transport.py")
"""Modules that do a part of several numbered actions."""

MOST_MODULES = 20
MOST_LINES = 5000


def citations() -> dict[Path, set[int]]:
    """Return the numbers in comments such as `# stage.py [5]`, by module."""
    cited = {}
    for path in PACKAGE.rglob("*.py"):
        if numbers := set(map(int, CITATION.findall(path.read_text(encoding="utf-8")))):
            cited[path] = numbers
    return cited


def test_every_number_of_the_diagram_is_cited_in_the_code_and_no_other() -> None:
    drawn = {int(number) for number in NUMBER.findall(stage.__doc__ or "")}
    assert drawn == set(range(1, max(drawn) + 1))
    assert set().union(*citations().values()) == drawn


def test_the_diagram_names_the_modules_of_each_number() -> None:
    named = {
        PACKAGE / module: {int(number) for number in NUMBER.findall(numbers)}
        for numbers, module in re.findall(r"((?:\[\d+\] )+) *(\w+/\w+\.py)", stage.__doc__ or "")
    }
    assert named == citations()


def test_a_training_step_can_be_read_in_few_modules() -> None:
    modules = {*citations(), *(PACKAGE / name for name in PASSED_THROUGH)}
    lines = {str(path): path.read_text(encoding="utf-8").count("\n") for path in modules}
    assert len(lines) <= MOST_MODULES, sorted(lines)
    assert sum(lines.values()) <= MOST_LINES, lines
