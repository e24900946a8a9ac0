"""`rpcmp new`: write the two files of a new job, a model and a config, as copies of an example."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from rpcmp.cli import echo
from rpcmp.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"

STARTER = "spirals"
"""The example that explains itself and needs nothing but torch."""


def examples() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.toml"))


def _complete(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    return [CompletionItem(name) for name in examples() if name.startswith(incomplete)]


@click.command()
@click.argument("name")
@click.option(
    "--like",
    metavar="EXAMPLE",
    default=STARTER,
    shell_complete=_complete,
    help="Start from one of the examples, such as resnet50.",
)
def new(name: str, like: str) -> None:
    """Write NAME.py, a model, and NAME.toml, its config, ready to run.

    Into the current folder, with comments. Nothing is overwritten. `rpcmp guide examples`
    describes the examples; what one needs besides its own file it takes from the package.

    \b
    Examples:
      rpcmp new my_model
      rpcmp new my_model --like llama
    """
    model, config = create(name, Path.cwd(), like)
    echo(f"{model.name}: the model")
    echo(f"{config.name}: how it is trained, and where")
    next_commands = {
        f"rpcmp drive {config.name}": "trains it, on stage servers of its own",
        f"rpcmp verify {config.name} --steps 5": "proves that the bits are those of one process",
        f"rpcmp doctor {config.name}": "tells what would go wrong, before a run on several hosts",
    }
    width = max(map(len, next_commands))
    for command, why in next_commands.items():
        echo(f"  {command:{width}}  # {why}")


def create(name: str, folder: Path, like: str = STARTER) -> list[Path]:
    """Write NAME.py and NAME.toml into `folder`, both or none, and return their paths."""
    template = EXAMPLES / f"{like}.toml"
    if not template.exists():
        raise ConfigError(f"no example {like!r}: choose one of {', '.join(examples())}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be a Python module's name: use letters, digits and '_', such as "
            "my_model"
        )
    model, config = folder / f"{name}.py", folder / f"{name}.toml"
    for path in (model, config):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path.name} is there already: choose another name, or move it away")
    # Python files beside a config come first on the import path.
    if (spec := importlib.util.find_spec(name)) is not None:
        where = "" if spec.origin is None else f" ({spec.origin})"
        raise ConfigError(
            f"there is a module {name!r} already{where}, which {name}.py would hide: choose "
            "another name"
        )
    _write(model, template.with_suffix(".py").read_text(encoding="utf-8"))
    try:
        _write(config, _renamed(template, name))
    except ConfigError:
        model.unlink()
        raise
    return [model, config]


def _renamed(template: Path, name: str) -> str:
    """Return the config for a folder with the model file; other examples stay in the package."""
    text = template.read_text(encoding="utf-8").replace("rpcmp/examples/", "")
    text = re.sub(rf"\b{template.stem}(?=\.toml\b|\.py\b|:\w)", name, text)
    for other in set(examples()) - {name}:  # `name` is the file beside this config
        text = re.sub(rf'"{other}(?=:\w)', f'"rpcmp.examples.{other}', text)
    return text


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
