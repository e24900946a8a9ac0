"""How many examples Hypothesis tries: few by default, all of them with `pytest -m cluster`."""

from __future__ import annotations

import os

import hypothesis

ALL = "RPCMP_TESTS_ALL_EXAMPLES"
"""Environment variable of test processes that try all examples."""

FEW = 25


def examples(most: int = 100, derandomize: bool = True) -> hypothesis.settings:
    """Return settings for a test whose examples cost a second or more."""
    number = most if ALL in os.environ else FEW
    return hypothesis.settings(deadline=None, derandomize=derandomize, max_examples=number)
