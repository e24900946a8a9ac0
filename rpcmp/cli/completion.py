"""`rpcmp completion`: what a shell needs to complete command lines of rpcmp.

What a shell may put in the place of a word that is begun: configs, their keys, names.

Run at each press of the tab key, so nothing here needs torch or gRPC.
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

from rpcmp.cli.terminal import echo

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rpcmp.config.keys import Level


Items = list["CompletionItem[str]"]


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """TOML files, and folders with some; where there are none, whatever files there are."""
    begun = Path(incomplete)
    is_whole = incomplete.endswith("/") or not incomplete
    folder, name = (begun, "") if is_whole else (begun.parent, begun.name)
    prefix = incomplete[: len(incomplete) - len(name)]
    files = [path.name for path in folder.glob("*.toml")]
    folders = {f"{path.parent.name}/" for path in folder.glob("*/*.toml")}
    names = (each for each in (*files, *folders) if each.isprintable())  # else it is several lines
    found = sorted(each for each in names if each.startswith(name))
    if not found:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(prefix + each) for each in found]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Keys of a config, down to its values where these are few: "data.batch_size="."""
    from rpcmp.config.keys import Level
    from rpcmp.config.schema import Config

    key, separator, _ = incomplete.partition("=")
    *parents, last = key.split(".")
    level = Level(Config)
    given = _given()
    for part in parents:
        level = level.below(part)
        given = _part(given, part)
    prefix = "".join(f"{part}." for part in parents)
    field = level.fields.get(last)
    items = _values(field, key) if separator else [*_names(level, given, prefix)]
    return [item for item in items if item.value.startswith(incomplete)]


def examples(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """What a new job may begin as."""
    from rpcmp.tools.new.create import examples as names

    return [CompletionItem(name) for name in names() if name.startswith(incomplete)]


def cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """What `rpcmp bench` has cases for, and configs."""
    from rpcmp.tools.bench.cases import frozen

    names = [CompletionItem(name) for name in frozen() if name.startswith(incomplete)]
    own = configs(ctx, param, incomplete)
    return names + [item for item in own if item.type == "plain" or not names]


def _given() -> Any:
    """What the config on the command line says; nothing where it cannot be read.

    By the words themselves: click does not parse a line that ends with an option without a value.
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
    """What may follow `prefix`: keys of the section, or what the file has there."""
    if level.container is list:
        number = len(given) if isinstance(given, list) else 1
        yield from (CompletionItem(f"{prefix}{index}.") for index in range(max(1, number)))
    elif level.fields:
        for name, field in level.fields.items():
            yield from _ends(name, field, prefix)
    elif isinstance(given, dict):
        for name, value in given.items():
            end = "." if isinstance(value, dict | list) else "="
            yield CompletionItem(f"{prefix}{name}{end}")


def _ends(name: str, field: FieldInfo, prefix: str) -> Iterator[CompletionItem[str]]:
    """A key that has a value, or others below it; a factory has both forms."""
    from rpcmp.config.keys import level_of
    from rpcmp.config.types import Factory

    level = level_of(field)
    if level.section is None or issubclass(level.section, Factory):
        yield CompletionItem(f"{prefix}{name}=", help=field.description)
    if level.section is not None or level.container is dict:
        yield CompletionItem(f"{prefix}{name}.", help=field.description)


def _values(field: FieldInfo | None, key: str) -> Items:
    from rpcmp.config.keys import kinds

    alternatives = () if field is None else kinds(field.annotation)
    values = ["true", "false"] if bool in alternatives else []
    for kind in alternatives:
        if get_origin(kind) is Literal:
            values += [str(value) for value in get_args(kind)]
    return [CompletionItem(f"{key}={value}") for value in values]


SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what SHELL needs to complete command lines.

    Commands, options, configs and their keys, names of examples and of cases.

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
    """Bash takes "key=value" for three words, and puts a space behind all that is complete.

    What it is given it inserts as it is: a file's name could be a command.
    """

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$(printf %%q "$value")")\n'
        "            [[ $value == *[=./] ]] && compopt -o nospace",
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before, and the one that is begun; see click."""
        before, begun = super().get_completion_args()
        *words, self._begun = _joined([*before, begun])
        return words, self._begun

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Only what comes after the last "=" of what is begun; see click."""
        known, separator, _ = self._begun.rpartition("=")
        value = item.value.removeprefix(known + separator)
        return f"{item.type},{value}"


@add_completion_class
class Zsh(ZshComplete):
    """Zsh puts a space behind all that is complete, too."""

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
    """Words with what stands around a "=" put together again."""
    joined: list[str] = []
    for word in words:
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        else:
            joined.append(word)
    return joined
