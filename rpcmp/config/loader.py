"""Read a config from a TOML file, with overrides from the command line and helpful errors.

Every problem is reported at once, each with its place and, for an unknown key, the nearest valid
name: "data.batchsize: unknown key; did you mean 'batch_size'?".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rpcmp.config.files import MIB, read_bytes
from rpcmp.config.keys import Level
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, KeyConfigError, nearest

MAX_CONFIG = 16 * MIB
"""The most bytes of a config."""

ALIKE = 0.6
"""Required similarity of a misspelt key and its suggestion; see `nearest`."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the config in the TOML file at `path`.

    Args:
        path: the file. The user's Python files are looked for in its folder, and its stem is the
            job's name unless the file gives one.
        overrides: "key=value" with dotted keys and TOML values, such as "data.batch_size=64"; a
            value that is not TOML is taken as a string.

    Raises:
        ConfigError: the file cannot be read or is not a valid config.
    """
    path = Path(path)
    try:
        data = tomllib.loads(read_bytes(path, MAX_CONFIG).decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    data.setdefault("name", re.sub(r"[^A-Za-z0-9_-]", "-", path.stem))
    for override in overrides:
        apply(data, override)
    return parse_config(data, str(path)).with_folder(path.parent)


def parse_config(data: dict[str, Any], source: str = "the config") -> Config:
    """Return the config made from plain data, such as parsed TOML.

    Raises:
        KeyConfigError: every problem of the data, a line each.
    """
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors()]
        raise KeyConfigError("\n  ".join([f"{source} has errors:", *lines])) from error
    config.graph()
    return config


def apply(data: dict[str, Any], override: str) -> None:
    """Set a key of parsed TOML by an override "key=value"; see `load_config`."""
    key, separator, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not separator or not last:
        raise ConfigError(f"--set {override!r}: write key=value, such as data.batch_size=64")
    found = value(text)
    table: Any = data
    for parent in parents:
        table = _descend(table, parent, override)
    if isinstance(table, list):
        _element(table, last, override)
        table[int(last)] = found
    else:
        table[last] = found


def value(text: str) -> Any:
    """Return `text` as a TOML value if it is one, else as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _descend(table: Any, key: str, override: str) -> Any:
    in_list = isinstance(table, list)
    child = _element(table, key, override) if in_list else table.setdefault(key, {})
    if isinstance(child, str):  # the short form of a factory: "torch.optim:SGD"
        child = {"callable": child}
        table[int(key) if in_list else key] = child
    if not isinstance(child, dict | list):
        raise ConfigError(f"--set {override!r}: {key!r} is a value, not a table")
    return child


def _element(table: list[Any], key: str, override: str) -> Any:
    if not key.isdecimal() or int(key) >= len(table):
        raise ConfigError(f"--set {override!r}: {key!r} is not one of 0 to {len(table) - 1}")
    return table[int(key)]


def _explain(details: ErrorDetails) -> str:
    place = [part for part in details["loc"] if not str(part).startswith("<")]  # see Own
    where = ".".join(map(str, place))
    if details["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_nearest(str(place[-1]), place[:-1])}"
    if details["type"] == "missing":
        return f"{where}: missing"
    message = details["msg"].removeprefix("Value error, ")
    if not place:
        return message
    if details["type"] == "string_pattern_mismatch":
        message = f"not of the form {_form(str(place[-1]))}"
    return f"{where}: {message} (got {details['input']!r})"


def _form(key: str) -> str:
    return "letters, digits, '-' and '_'" if key == "name" else '"module:callable"'


def _nearest(key: str, place: Sequence[int | str]) -> str:
    valid = list(_keys(place))
    if near := nearest(key, valid, ALIKE):
        return f"did you mean {near!r}?"
    for section in () if place else ("model", "data", "stages"):
        if near := nearest(key, _keys([section]), ALIKE):
            return f"did you mean {near!r} in [{section}]?"
    return f"valid keys: {', '.join(valid)}"


def _keys(place: Sequence[int | str]) -> Iterable[str]:
    level = Level(Config)
    for part in place:
        level = level.below(str(part))
    return level.fields
