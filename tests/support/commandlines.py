"""Command lines of rpcmp in other files: whether rpcmp accepts them, and their meaning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rpcmp.cli import cli
from rpcmp.config import loader
from rpcmp.config.schema import Config
from tests.support.places import EXAMPLES


def parsed(command: Sequence[str]) -> dict[str, Any]:
    """Parse a command line; return its options and arguments, and its name as "command".

    Args:
        command: the words after the program's name.

    Raises:
        click.UsageError: rpcmp has no such command or option.
    """
    name, *rest = command
    group = click.Context(cli)
    found = cli.get_command(group, name)
    if found is None:
        raise click.UsageError(f"no command {name!r}")
    values, surplus, _ = found.make_parser(click.Context(found)).parse_args(list(rest))
    if surplus:
        raise click.UsageError(f"{name} does not take {surplus}")
    return {"command": name, **values}


def config_of(drive: dict[str, Any]) -> Config:
    """Return the config of a parsed `rpcmp drive`, which must be an example in the image."""
    folder, name = Path(drive["config"]).parent, Path(drive["config"]).name
    assert folder == Path("/examples")
    return loader.load_config(EXAMPLES / name, drive["overrides"])


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments: ("USER", "1:1")."""
    text = re.sub(r"(?m)^\s*#.*\n", "", dockerfile.read_text()).replace("\\\n", " ")
    found = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in found]
