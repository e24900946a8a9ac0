"""Functions that a message from another host may name, by its sender.

torch's messages carry Python's pickle, and torch does not check the caller. So a server reads the
pickle before its worker does, with inert stand-ins for everything that it names, and refuses what
the sender has no business with: a stage asks others for outputs, sums and missing gradients, and
the driver for samples. Only the driver does the rest.

The worker's own unpickler, `rpcmp.rpc.unpickler`, decides about everything else that is named.

Both allocate memory as a pickle tells them to: ten bytes that memoize something under a large
number make Python reserve gigabytes, and a megabyte of empty lists takes a hundred. So a pickle has
to consist of what Python's pickler writes today (protocol 4), which numbers its memo by itself, and
must not have too many operations.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from rpcmp.config.topology import DRIVER
from rpcmp.net.rpc_format import FormatError

_FUNCTIONS = {
    "rpcmp.rpc.transport",
    "rpcmp.worker.stage",
    "rpcmp.worker.optimizer",
    "rpcmp.data.batch_server",
}
"""Modules whose functions and methods messages name."""

STAGES_CALL = {
    ("rpcmp.rpc.transport", "_dispatch"),
    ("rpcmp.worker.stage", "Stage.forward"),
    ("rpcmp.worker.stage", "Stage.note_missing"),
    ("rpcmp.worker.stage", "Stage.part"),
    ("rpcmp.worker.stage", "Stage.posted"),
    ("rpcmp.worker.stage", "Stage.total"),
    ("rpcmp.data.batch_server", "BatchServer.slices"),
}
"""Functions that a stage may call, on other stages and on the driver."""

MAX_OPERATIONS = 2**20
"""Per pickle. The largest are samples of a data set that gives no tensors, and traces."""

_RUN_LENGTH = 64

_PLAIN = rb"[N\x88\x89\]ae)\x85-\x87t}su\x8f\x90\x91(01\x94\x93Rb\x81\x92]"
_FIXED = rb"[Kh].|M..|[Jj].{4}|G.{8}|\x80[\x02-\x05]|\x95.{8}"
_SHORT = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(256))
_RUN = re.compile(
    rb"(?:%b|%b|[\x8cC\x8a](?:%b)){1,%d}+" % (_PLAIN, _FIXED, _SHORT, _RUN_LENGTH), re.DOTALL
)
"""Operations without arguments, with arguments of fixed length, and with a length of one byte."""

_LONG = {b"X": 4, b"B": 4, b"\x8b": 4, b"\x8d": 8, b"\x8e": 8, b"\x96": 8}
"""Operations with long arguments, and the number of bytes of their lengths."""


def require(data: bytes, peer: str, is_call: bool) -> None:
    """Refuse a pickle that names a function which its sender may not call.

    Args:
        data: the pickle.
        peer: RPC name of the sender.
        is_call: whether the message is a call; an answer may name no function.

    Raises:
        FormatError: it does, or is not a pickle.
    """
    _require_bounded(data)
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


def _require_bounded(data: bytes) -> None:
    """Refuse a pickle that would make its reader take far more memory than it has bytes."""
    at = operations = 0
    while (code := data[at : at + 1]) != b".":
        begin = at
        if (size := _LONG.get(code)) is not None:
            at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
            if at > len(data):  # by up to 2^64, more than a position in bytes can be
                raise FormatError("a pickle with an argument that goes on behind its end")
        elif (run := _RUN.match(data, at)) is not None:
            at = run.end()
        else:
            raise FormatError("a pickle with what Python's pickler does not write")
        operations += min(at - begin, _RUN_LENGTH)  # or less: some have arguments
        if operations > MAX_OPERATIONS:
            raise FormatError(f"a pickle of more than {MAX_OPERATIONS:,} operations")
    if at + 1 != len(data):
        raise FormatError("a pickle that goes on behind its end")


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing or running anything."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.functions: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> type:
        """Return the stand-in for a name; functions start with "_", methods contain a dot."""
        if module in _FUNCTIONS and ("." in name or name.startswith("_")):
            self.functions.append((module, name))
            return _Function
        return _Data


class _Unchanged(type):
    """Base of stand-ins: a pickle may change what it names, and this process reads many."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise FormatError(f"a pickle that changes {name!r} of what it names")


class _Function(metaclass=_Unchanged):
    """Stand-in for a function: an argument, never called or changed while the message is read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Function:
        raise FormatError("a function that is called by the pickle itself")


class _Data(metaclass=_Unchanged):
    """Stand-in for a class and its instances: accepts everything, and keeps nothing."""

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
        """For lists and deques."""

    def extend(self, items: object) -> None:
        """For lists."""

    def add(self, item: object) -> None:
        """For sets."""
