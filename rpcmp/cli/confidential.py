"""A command line to be shown: texts that were given in confidence are left to a shell variable.

    --set data.kwargs.token=SECRET    becomes    --set data.kwargs.token="${TOKEN:?fill it in}"

Pasted, it fails with "fill it in" until the variable has been exported: it never runs without.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rpcmp import configfile
from rpcmp.checkpoint.redaction import redacted

SET = "--set"

_SECRET = re.compile(r"token(\.|$)|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)
"""What keys are called whose values are not shown wherever they stand."""


def shown(words: Sequence[str]) -> str:
    """Join `words` to a line for a shell, without the confidential values of its --set."""
    line: list[str] = []
    before = ""
    for word in words:
        inline = word.startswith(f"{SET}=")
        override = word.removeprefix(f"{SET}=") if inline or before == SET else ""
        key, separator, value = override.partition("=")
        if separator and is_confidential(key.strip(), value):
            line.append(f"{shlex.quote(SET + '=') if inline else ''}{_left_out(key.strip())}")
        else:
            line.append(shlex.quote(word))
        before = word
    return " ".join(line)


def is_confidential(key: str, value: str) -> bool:
    """Whether a manifest would have the hash of a text in `value`, or its key is called so.

    Args:
        key: dotted, such as "optimizer.kwargs.lr".
        value: TOML, or else a text.
    """
    if _SECRET.search(key):
        return True
    parsed = configfile.value(value)
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return bool(redacted(parsed) != parsed or _names_a_secret(parsed))


def _names_a_secret(value: object) -> bool:
    if isinstance(value, dict):
        return any(_SECRET.search(key) or _names_a_secret(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_names_a_secret, value))


def _left_out(key: str) -> str:
    """`key` and its value, which is a variable named after the last of the key that is a name."""
    names = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", key)
    variable = names[-1].upper() if names else "VALUE"
    return f'{shlex.quote(f"{key}=")}"${{{variable}:?fill it in}}"'
