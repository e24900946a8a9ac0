"""What a manifest tells of a config: not what was given to the user's own code in confidence."""

from __future__ import annotations

import hashlib
from typing import Any

DIGITS = 16


def redacted(config: Any, is_given: bool = False) -> Any:
    """A config in which every text among `kwargs` is replaced by its hash, which still tells
    whether it has changed: it may be a token to download data with, or a database's password.

    Args:
        config: the config, or a part of one.
        is_given: whether that is among arguments.
    """
    if isinstance(config, dict):
        return {key: redacted(item, is_given or key == "kwargs") for key, item in config.items()}
    if isinstance(config, list):
        return [redacted(item, is_given) for item in config]
    if isinstance(config, str) and is_given:
        return f"sha256:{hashlib.sha256(config.encode()).hexdigest()[:DIGITS]}"
    return config
