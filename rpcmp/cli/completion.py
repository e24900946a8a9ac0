"""`rpcmp completion`: shell completion of commands, options, configs, their keys, and names.

It runs at each press of the tab key, so nothing here imports torch or gRPC.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from rpcmp.cli import echo

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rpcmp.config.loader import Level


Items = list["CompletionItem[str]"]


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete TOML files, and folders that have some; else any files."""
    partial = Path(incomplete)
    is_whole = incomplete.endswith("/") or not incomplete
    folder, name = (partial, "") if is_whole else (partial.parent, partial.name)
    prefix = incomplete[: len(incomplete) - len(name)]
    files = [path.name for path in folder.glob("*.toml")]
    folders = {f"{path.parent.name}/" for path in folder.glob("*/*.toml")}
    names = (each for each in (*files, *folders) if each.isprintable())  # else it is several lines
    found = sorted(each for each in names if each.startswith(name))
    if not found:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(prefix + each) for each in found]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete keys of a config, such as "data.batch_size=", and values from a short list."""
    from rpcmp.config.job_sections import JobSettings
    from rpcmp.config.loader import Level

    key, separator, _ = incomplete.partition("=")
    *parents, last = key.split(".")
    level = Level(JobSettings)
    given = _given()
    for part in parents:
        level = level.below(part)
        given = _part(given, part)
    prefix = "".join(f"{part}." for part in parents)
    field = level.fields.get(last)
    items = _values(field, key) if separator else [*_names(level, given, prefix)]
    return [item for item in items if item.value.startswith(incomplete)]


def cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    from rpcmp.tools.bench.cases import frozen

    names = [CompletionItem(name) for name in frozen() if name.startswith(incomplete)]
    own = configs(ctx, param, incomplete)
    return names + [item for item in own if item.type == "plain" or not names]


def _given() -> Any:
    """Return the config on the command line, parsed; empty if it cannot be read.

    Click does not parse a line that ends with an option without value, so the words are searched.
    """
    words = split_arg_string(os.environ.get("COMP_WORDS", ""))
    config = next((word for word in words if word.endswith(".toml")), None)
    try:
        return tomllib.loads(Path(config).read_text(encoding="utf-8")) if config else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _part(given: Any, part: str) -> Any:
    if isinstance(given, list) and part.isdecimal() and int(part) < len(given):
        return given[int(part)]
    return given.get(part, {}) if isinstance(given, dict) else {}


def _names(level: Level, given: Any, prefix: str) -> Iterator[CompletionItem[str]]:
    from rpcmp.config.loader import descriptions, level_of
    from rpcmp.config.types import Factory

    if level.container is list:
        number = len(given) if isinstance(given, list) else 1
        yield from (CompletionItem(f"{prefix}{index}.") for index in range(max(1, number)))
    elif level.section is not None and level.fields:
        meanings = descriptions(level.section)
        for name, field in level.fields.items():
            # A key that takes a value, or keys below it; a factory takes both.
            below = level_of(field)
            if below.section is None or issubclass(below.section, Factory):
                yield CompletionItem(f"{prefix}{name}=", help=meanings[name])
            if below.section is not None or below.container is dict:
                yield CompletionItem(f"{prefix}{name}.", help=meanings[name])
    elif isinstance(given, dict):
        for name, value in given.items():
            end = "." if isinstance(value, dict | list) else "="
            yield CompletionItem(f"{prefix}{name}{end}")


def _values(field: FieldInfo | None, key: str) -> Items:
    from rpcmp.config.loader import union_members

    alternatives = () if field is None else union_members(field.annotation)
    values = ["true", "false"] if bool in alternatives else []
    for kind in alternatives:
        if get_origin(kind) is Literal:
            values += [str(value) for value in get_args(kind)]
    return [CompletionItem(f"{key}={value}") for value in values]


SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    It completes commands, options, configs and their keys, names of examples and of cases.

    \b
    Examples:
      eval "$(rpcmp completion bash)"                                  in ~/.bashrc
      eval "$(rpcmp completion zsh)"                                   in ~/.zshrc
      rpcmp completion fish > ~/.config/fish/completions/rpcmp.fish    once
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click does not know the shell {shell!r}")
    root = click.get_current_context().find_root().command
    echo(found(root, {}, "rpcmp", "_RPCMP_COMPLETE").source())


@add_completion_class
class Bash(BashComplete):
    """Bash splits "key=value" into three words, and appends a space to every completion.

    It inserts completions unquoted, so they are quoted here: a file name could be a command.
    """

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$(printf %%q "$value")")\n'
        "            [[ $value == *[=./] ]] && compopt -o nospace",
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words and the incomplete one; see click."""
        before, incomplete = super().get_completion_args()
        *words, self._incomplete = _joined([*before, incomplete])
        return words, self._incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return only what comes after the last "=" of the incomplete word; see click."""
        known, separator, _ = self._incomplete.rpartition("=")
        value = item.value.removeprefix(known + separator)
        return f"{item.type},{value}"


@add_completion_class
class Zsh(ZshComplete):
    """Zsh appends a space to every completion, too."""

    source_template = (
        ZshComplete.source_template.replace(
            "    local -a response\n", "    local -a response\n    local end=' '\n"
        )
        .replace(
            "    for type key descr in ${response}; do\n",
            "    for type key descr in ${response}; do\n        [[ $key == *[=./] ]] && end=''\n",
        )
        .replace(
            "completions_with_descriptions -U\n", 'completions_with_descriptions -U -S "$end"\n'
        )
        .replace("compadd -U -V", 'compadd -U -S "$end" -V')
    )


def _joined(words: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for word in words:
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        else:
            joined.append(word)
    return joined
