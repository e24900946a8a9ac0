"""Suggest names for misspelt ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NAMED = 5
"""The most existing names that an error lists."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the name in `known` that is most similar to `name`, if any is.

    Args:
        cutoff: required similarity, from 0 to 1; see `difflib.get_close_matches`.
    """
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str | None) -> str:
    """Return the end of an error that suggests `name`; empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"


def what_there_is(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a suggestion and existing names."""
    every = list(known)
    if not every:
        return ""
    near = nearest(name, every)
    some = ", ".join(map(repr, every[:NAMED]))
    return f"{did_you_mean(near)} (there are {some}{', ...' if len(every) > NAMED else ''})"
