"""Which functions a message of another host may name: what members call, by who they are.

Torch's messages carry Python's pickle, and torch knows no caller. So a server reads the pickle
before its worker does, with inert stand-ins for everything that it names, and refuses what the
member on the other side has no business with: a stage asks others for outputs, sums and what is
missing, and the driver for samples. Only the driver does the rest.

The worker's own unpickler, `rpcmp.unpickling`, decides over everything else that is named.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from rpcmp.members import DRIVER
from rpcmp.wire.rpcformat import FormatError

_FUNCTIONS = {
    "rpcmp.transport",
    "rpcmp.worker.stage",
    "rpcmp.worker.optimizer",
    "rpcmp.source",
    "torch.distributed.rpc.api",
}
"""Modules whose functions and methods messages name."""

STAGES_CALL = {
    ("rpcmp.transport", "_dispatch"),
    ("rpcmp.worker.stage", "Stage.forward"),
    ("rpcmp.worker.stage", "Stage.note_missing"),
    ("rpcmp.worker.stage", "Stage.part"),
    ("rpcmp.worker.stage", "Stage.posted"),
    ("rpcmp.worker.stage", "Stage.total"),
    ("rpcmp.source", "Source.slices"),
    ("torch.distributed.rpc.api", "_gather_to_leader"),
    ("torch.distributed.rpc.api", "_broadcast_to_followers"),
}
"""What a stage may call, of others and of the driver."""


def require(data: bytes, peer: str, is_call: bool) -> None:
    """Refuse a pickle that names a function which its sender may not call.

    Args:
        data: the pickle.
        peer: RPC name of the sender.
        is_call: whether the message calls; an answer names no function at all.

    Raises:
        FormatError: it does, or is no pickle.
    """
    reader = _Reader(io.BytesIO(data))
    try:
        reader.load()
    except FormatError:
        raise
    except Exception as error:  # unpickling raises whatever it stumbles over
        raise FormatError(f"a pickle that cannot be read ({type(error).__name__})") from error
    for module, name in reader.functions:
        if not is_call:
            raise FormatError(f"an answer that names the function {module}.{name}")
        if peer != DRIVER and (module, name) not in STAGES_CALL:
            raise FormatError(f"a call of {module}.{name}, which only the driver may make")


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing or running anything."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.functions: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> type:
        """Return the stand-in of a name; a method's has a dot, a function's begins with a line."""
        if module in _FUNCTIONS and ("." in name or name.startswith("_")):
            self.functions.append((module, name))
            return _Function
        return _Data


class _Function:
    """A function in a message: an argument, never called or changed while the message is read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Function:
        raise FormatError("a function that is called by the pickle itself")


class _Data:
    """A class in a message, and what is made of it: takes everything, and keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Data:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Data:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        """As of a list or a deque."""

    def extend(self, items: object) -> None:
        """As of a list."""

    def add(self, item: object) -> None:
        """As of a set."""
