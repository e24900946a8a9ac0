"""What somebody may have meant who has misspelt a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NAMED = 5
"""Of the names that there are, how many an error lists."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name in `known` that is most like `name`; None where none is.

    Args:
        cutoff: how alike they have to be, from 0 to 1; see `difflib.get_close_matches`.
    """
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str | None) -> str:
    """The end of an error that suggests `name`; empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"


def what_there_is(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that there is none of: what may be meant, what there is."""
    every = list(known)
    if not every:
        return ""
    near = nearest(name, every)
    some = ", ".join(map(repr, every[:NAMED]))
    return f"{did_you_mean(near)} (there are {some}{', ...' if len(every) > NAMED else ''})"
