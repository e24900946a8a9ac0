"""Exit statuses in words."""

from __future__ import annotations

import pytest

from rpcmp.process import interpreter


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was ended by signal 9 (SIGKILL)"),
        (-40, "was ended by signal 40"),
        (None, "has ended"),
    ],
)
def test_describe_exit_puts_a_status_in_words(code: int | None, words: str) -> None:
    assert interpreter.describe_exit(code) == words
