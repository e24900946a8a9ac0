"""What a manifest tells of a config: not what was given to the user's own code in confidence.

A hash still tells whether a text has changed. It hides a token, which nobody can guess; a password
that is in somebody's list of passwords it does not.

Nested tables, such as a config, as one flat table.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

DIGITS = 16

_HASHED = re.compile(rf"sha256:[0-9a-f]{{{DIGITS}}}")


def redacted(config: Any, is_given: bool = False) -> Any:
    """A config in which every text among arguments is replaced by its hash; twice is as once.

    Args:
        config: the config, or a part of one.
        is_given: whether that is among arguments: `kwargs`, and those of a stage's `optimizer` or
            `scheduler`.
    """
    if isinstance(config, dict):
        return {
            key: redacted(item, is_given or _holds_arguments(key, item))
            for key, item in config.items()
        }
    if isinstance(config, list):
        return [redacted(item, is_given) for item in config]
    if isinstance(config, str) and is_given and not _HASHED.fullmatch(config):
        return f"sha256:{hashlib.sha256(config.encode()).hexdigest()[:DIGITS]}"
    return config


def _holds_arguments(key: str, item: Any) -> bool:
    is_factory = isinstance(item, dict) and "callable" in item
    return key == "kwargs" or (key in ("optimizer", "scheduler") and not is_factory)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables and lists of tables, by dotted key; other lists are leaves."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
