"""`rpcmp completion`: what a shell needs to complete command lines of rpcmp."""

from __future__ import annotations

from collections.abc import Sequence

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from rpcmp.cli.terminal import echo

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
