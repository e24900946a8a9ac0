"""Read a config from a TOML file, with overrides from the command line and helpful errors.

Problems of keys are reported all at once, each with its key, its value and what is allowed, or the
nearest valid name:

    seed: must be an integer (got 1.5)
    data.batchsize: unknown key; did you mean 'batch_size'?

`Level` walks along dotted keys, also for the completion of command lines.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import tomllib
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rpcmp.config.files import MIB, read_bytes
from rpcmp.config.job_sections import JobSettings
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
        apply_override(data, override)
    return parse_config(data, str(path)).with_folder(path.parent)


def parse_config(data: dict[str, Any], source: str = "the config") -> Config:
    """Return the config made from plain data, such as parsed TOML.

    Raises:
        KeyConfigError: every problem of the data, a line each.
    """
    if "cut" in data:  # only a run's own
        raise KeyConfigError(f"{source} has errors:\n  cut: unknown key; {_nearest('cut', [])}")
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise key_error(error, source) from error
    config.graph()
    return config


def key_error(
    error: ValidationError, source: str, root: type[BaseModel] = JobSettings
) -> KeyConfigError:
    """Return an error with every problem of parsed TOML, a line each; `root`: what it should be."""
    lines = [_explain(details, root) for details in error.errors()]
    return KeyConfigError("\n  ".join([f"{source} has errors:", *lines]))


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set a key of parsed TOML by an override "key=value"; see `load_config`."""
    key, separator, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not separator or not last:
        raise ConfigError(f"--set {override!r}: write key=value, such as data.batch_size=64")
    try:
        new = parse_value(text)
    except RecursionError as error:
        raise ConfigError(f"--set {override[:40]!r}...: the value is nested too deeply") from error
    table: Any = data
    for parent in parents:
        table = _descend(table, parent, override)
    if isinstance(table, list):
        _element(table, last, override)
        table[int(last)] = new
    else:
        table[last] = new


def parse_value(text: str) -> Any:
    """Return `text` as a TOML value if it is one, else as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # also an integer of thousands of digits
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
    if not table:
        raise ConfigError(f"--set {override!r}: {key!r} would be an element of an empty list")
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(table):
        raise ConfigError(f"--set {override!r}: {key!r} is not one of 0 to {len(table) - 1}")
    return table[int(key)]


ALLOWED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "bool_type": "true or false",
    "list_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "a table",
    "model_type": "a table",
    "invalid-json-value": "a string, a number, true, false, a list or a table",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
}
"""What a value must be, by the type of pydantic's error; other messages are shown as they are."""


def _explain(details: ErrorDetails, root: type[BaseModel]) -> str:
    place = [part for part in details["loc"] if not str(part).startswith("<")]  # see StageOverride
    where = ".".join(map(str, place))
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {_nearest(str(place[-1]), place[:-1], root)}"
    if kind == "missing":
        return f"{where}: missing"
    message = details["msg"].removeprefix("Value error, ")
    if not place:
        return message
    if kind == "string_pattern_mismatch":
        is_name = place[-1] == "name"
        form = "letters, digits, '-' and '_'" if is_name else '"module:callable"'
        message = f"not of the form {form}"
    elif kind in ALLOWED and place == ["model", "balance"]:
        message = "must be a list of integers or 'auto'"
    elif kind in ALLOWED:
        limits = {
            key: f"{limit:g}" if isinstance(limit, float) else limit
            for key, limit in details.get("ctx", {}).items()
        }
        message = f"must be {ALLOWED[kind].format(**limits)}"
    return f"{where}: {message} (got {details['input']!r})"


def _nearest(key: str, place: Sequence[int | str], root: type[BaseModel] = JobSettings) -> str:
    valid = list(_keys(place, root))
    if near := nearest(key, valid, ALIKE):
        return f"did you mean {near!r}?"
    for section in ("model", "data", "stages") if root is JobSettings and not place else ():
        if near := nearest(key, _keys([section], root), ALIKE):
            return f"did you mean {near!r} in [{section}]?"
    return f"valid keys: {', '.join(valid)}"


def _keys(place: Sequence[int | str], root: type[BaseModel]) -> Iterable[str]:
    level = Level(root)
    for part in place:
        level = level.below(str(part))
    return level.fields


@dataclass(frozen=True)
class Level:
    """The section or table that a dotted key leads to.

    Attributes:
        container: list or dict if there are several such sections, or dict for a plain table.
    """

    section: type[BaseModel] | None
    container: type | None = None

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The keys that may follow; empty below a list or a table, whose keys are the user's."""
        return {} if self.section is None or self.container else self.section.model_fields

    def below(self, part: str) -> Level:
        """Return the level that the next part of the key leads to."""
        if self.container is dict or (self.container is list and part.isdecimal()):
            return Level(self.section)
        field = self.fields.get(part)
        return Level(None) if field is None else level_of(field)


def level_of(field: FieldInfo) -> Level:
    """Return the level below the key of this field."""
    alternatives = union_members(field.annotation)
    for kind in alternatives:
        if (section := _section_in(kind)) is not None:
            origin = get_origin(kind)
            return Level(section, origin if origin in (list, dict) else None)
    return Level(None, dict if any(get_origin(kind) is dict for kind in alternatives) else None)


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return what each key of a section means, which is the text below it in the source.

    pydantic can read these texts itself, but does so whenever the sections are imported: that would
    make each command slower.
    """
    found = {}
    for base in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(ast.Name(key)), ast.Expr(ast.Constant(str(meaning))):
                    found[key] = " ".join(meaning.split()).removesuffix(".")
    return found


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have besides None; unions and Annotated are taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return union_members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in union_members(member))
    return () if annotation is types.NoneType else (annotation,)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)
