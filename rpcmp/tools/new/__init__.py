"""Write the two files of a new job, a model and a config, from templates: `rpcmp new`.

The templates are the files here, or an example, which run themselves. Only names in them are
replaced.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from rpcmp.errors import ConfigError

STARTER = Path(__file__).parent / "my_model.toml"

EXAMPLES = Path(__file__).parents[2] / "examples"


def examples() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.toml"))


def create(name: str, folder: Path, like: str | None = None) -> list[Path]:
    """Write NAME.py and NAME.toml into `folder`, both or none, and return their paths.

    Args:
        like: name of the example to copy; None: the templates here.
    """
    template = STARTER if like is None else EXAMPLES / f"{like}.toml"
    if not template.exists():
        raise ConfigError(f"no example {like!r}: choose one of {', '.join(examples())}")
    model, config = folder / f"{name}.py", folder / f"{name}.toml"
    _require_name(name)
    for path in (model, config):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path.name} is there already: choose another name, or move it away")
    _require_free(name)
    _write(model, template.with_suffix(".py").read_text(encoding="utf-8"))
    try:
        _write(config, _renamed(template, name))
    except ConfigError:
        model.unlink()
        raise
    return [model, config]


def _require_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be a Python module's name: use letters, digits and '_', such as "
            "my_model"
        )


def _require_free(name: str) -> None:
    # Python files beside a config come first on the import path.
    spec = importlib.util.find_spec(name)
    if spec is not None:
        where = "" if spec.origin is None else f" ({spec.origin})"
        raise ConfigError(
            f"there is a module {name!r} already{where}, which {name}.py would hide: choose "
            "another name"
        )


def _renamed(template: Path, name: str) -> str:
    """Return the config for a folder with the model file; other examples stay in the package."""
    text = template.read_text(encoding="utf-8").replace("rpcmp/examples/", "")
    own = template.stem
    text = re.sub(rf"\b{own}(?=\.toml\b|\.py\b|:\w)", name, text)
    for other in examples():
        text = re.sub(rf'"{other}(?=:\w)', f'"rpcmp.examples.{other}', text)
    return text


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
