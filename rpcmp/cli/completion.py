"""`rpcmp completion`: shell completion of commands, options, configs, their keys, and names.

It runs at each press of the tab key, so nothing here imports torch or gRPC.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args, get_origin

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
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


Items = list["CompletionItem[str]"]


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete TOML files, and folders with such; any files if there are none."""
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
    """Complete keys of a config, such as "data.batch_size=", and values of which there are few."""
    from rpcmp.config.schema import Config

    key, separator, _ = incomplete.partition("=")
    *parents, _ = key.split(".")
    found: Any = Config
    given = _given()
    for part in parents:
        found = _within(found, part)
        given = _part(given, part)
    prefix = "".join(f"{part}." for part in parents)
    if separator:
        items = _values(_field(found, key.rpartition(".")[2]), key)
    else:
        items = [*_names(found, given, prefix)]
    return [item for item in items if item.value.startswith(incomplete)]


def examples(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete names of examples."""
    from rpcmp.tools.new.create import examples as names

    return [CompletionItem(name) for name in names() if name.startswith(incomplete)]


def cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Complete names of benchmark cases, and configs."""
    from rpcmp.tools.bench.cases import frozen

    names = [CompletionItem(name) for name in frozen() if name.startswith(incomplete)]
    own = configs(ctx, param, incomplete)
    return names + [item for item in own if item.type == "plain" or not names]


def _given() -> Any:
    """Return the config on the command line, parsed; empty if it cannot be read.

    It is searched in the words: click does not parse a line that ends with an option without value.
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


def _is_section(model: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether the keys of `model` are known; those of a plain table are not."""
    return isinstance(model, type) and hasattr(model, "model_fields")


def _field(model: Any, name: str) -> FieldInfo | None:
    return model.model_fields.get(name) if _is_section(model) else None


def _within(model: Any, part: str) -> Any:
    """Return the type below a key: a section's model, a list of it, or None if it is unknown."""
    if get_origin(model) is list and part.isdecimal():
        return _section(model)
    field = _field(model, part)
    if field is None:
        return None
    is_list = any(get_origin(kind) is list for kind in _kinds(field.annotation))
    section = _section(field.annotation)
    return list[section] if is_list and section else section  # type: ignore[valid-type]


def _section(annotation: Any) -> type[BaseModel] | None:
    from rpcmp.config.loader import section_of

    return section_of(annotation)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    parts = get_args(annotation)
    return parts if NoneType in parts else (annotation, *parts)


def _names(model: Any, given: Any, prefix: str) -> Iterator[CompletionItem[str]]:
    """Complete `prefix` with keys of the model, or with those that the file has there."""
    if get_origin(model) is list:
        number = len(given) if isinstance(given, list) else 1
        yield from (CompletionItem(f"{prefix}{index}.") for index in range(max(1, number)))
    elif _is_section(model):
        for name, field in model.model_fields.items():
            yield from _ends(name, field, prefix)
    elif isinstance(given, dict):
        for name, value in given.items():
            end = "." if isinstance(value, dict | list) else "="
            yield CompletionItem(f"{prefix}{name}{end}")


def _ends(name: str, field: FieldInfo, prefix: str) -> Iterator[CompletionItem[str]]:
    """Complete a key that takes a value, or keys below it; a factory takes both."""
    from rpcmp.config.types import Factory

    section = _section(field.annotation)
    is_table = get_origin(field.annotation) is dict or "dict" in str(field.annotation)
    help_text = field.description
    if section is None or issubclass(section, Factory):
        yield CompletionItem(f"{prefix}{name}=", help=help_text)
    if section is not None or is_table:
        yield CompletionItem(f"{prefix}{name}.", help=help_text)


def _values(field: FieldInfo | None, key: str) -> Items:
    kinds = _kinds(field.annotation) if field is not None else ()
    values = ["true", "false"] if bool in kinds else []
    for kind in kinds:
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
    """Join the words around each "=" again."""
    joined: list[str] = []
    for word in words:
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        else:
            joined.append(word)
    return joined
