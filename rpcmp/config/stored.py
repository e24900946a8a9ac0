"""A config as it is stored: in the manifest of a checkpoint, with stage servers, in a run's folder.

The strings among the arguments of the user's code are replaced by hashes, which still show whether
a string has changed. Such a hash hides a token, which cannot be guessed, but not a password that is
on a list of common ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpcmp.config.schema import Config

DIGITS = 16

_HASHED = re.compile(rf"sha256:[0-9a-f]{{{DIGITS}}}")


def redacted(config: Any, is_given: bool = False) -> Any:
    """Return a config with the hash of every text among arguments in its place; idempotent.

    Args:
        is_given: whether this part is among the arguments of a callable: `kwargs`, or the arguments
            in a stage's `optimizer` or `scheduler`.
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
    """Yield the leaves of nested tables by dotted key; lists without tables are leaves."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def stored(config: Config) -> Any:
    """Return a config as a manifest has it; the destinations of the log do not affect results."""
    return redacted(
        config.model_dump(mode="json", exclude={"log": True, "cut": {"split", "passing"}})
    )


def changes(before: Any, config: Config) -> list[str]:
    """Return the dotted keys in which a config differs from a stored one: "optimizer.kwargs.lr"."""
    return _differences(redacted(before), stored(config), "")


def _differences(before: Any, now: Any, place: str) -> list[str]:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [] if before == now else [place]
    keys = [*before, *(key for key in now if key not in before)]
    return [
        name
        for key in keys
        for name in _differences(
            before.get(key), now.get(key), f"{place}.{key}" if place else str(key)
        )
    ]
