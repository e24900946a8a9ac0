"""How a process ended, in words."""

from __future__ import annotations

import signal


def told(code: int | None) -> str:
    """What to say of an exit status, after the name of whose it is.

    Args:
        code: as `subprocess` and `multiprocessing` give it: -n, ended by signal n; None: unknown.
    """
    if code is None:
        return "has ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
