"""Files that the driver process writes, such as a trace: a confined one cannot write where they go.

It gets names in its own temporary folder, and this process moves what lies there to its place.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rpcmp.errors import ConfigError
from rpcmp.process.channel import Message

KEYS = ("save_state", "trace", "last_steps")
"""Of an order to train; what each file is."""


class Outputs:
    """The files of one generation.

    Args:
        scratch: the driver process's temporary folder; None: it is not confined, and writes files
            to their places itself.
    """

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._places: dict[Path, Path] = {}

    def redirect(self, order: Message) -> Message:
        """The order, with names that the driver process can write to."""
        if self._scratch is None:
            return order
        redirected = dict(order)
        for key in KEYS:
            if order.get(key):
                place = Path(order[key])
                # With its name: by its suffix a trace is compressed.
                written = self._scratch / f"{key}-{place.name}"
                self._places[written] = place
                redirected[key] = str(written)
        return redirected

    def deliver(self) -> None:
        """Move what has been written to its place.

        Raises:
            ConfigError: it cannot be moved there.
        """
        for written, place in self._places.items():
            if not written.exists():  # of last steps there may be none
                continue
            try:
                shutil.copyfile(written, place)  # with the modes of a file that is written there
            except OSError as error:
                raise ConfigError(f"cannot write {place}: {error.strerror}") from error
