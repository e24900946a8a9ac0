"""An unpickler for torch RPC that only finds the names which messages need.

torch RPC pickles, so a sender could make a worker look up and call any function. No process outside
the group gets that far; this is a second lock in case that one does. A message may consist of the
types in rpcmp.rpc.messages, of plain containers, and of named tuples of the modules that the job's
config names, because batches may be such. It may name the methods that are called remotely, but
they arrive as a Method, which cannot be called while the message is read. All else is refused.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterable
from enum import Enum, EnumType
from types import FunctionType
from typing import Any

import torch

from rpcmp.errors import SecurityError

_ENTRANCES = {"_dispatch", "_dispatch_rref", "_get_service", "_get_part"}
"""Functions of rpcmp.rpc.transport that torch calls with the content of a message."""

_DATA = {
    "rpcmp.rpc.messages",
    "rpcmp.rpc.shared_memory",
    "rpcmp.pipelining.schedule",
    "rpcmp.observability.trace.spans",
    "rpcmp.rpc.transport",
}
"""Modules of the named tuples, enums and data classes in messages."""

_CALLED = {
    ("rpcmp.worker.stage", "Stage"),
    ("rpcmp.worker.optimizer", "StageOptimizer"),
    ("rpcmp.data.batch_server", "BatchServer"),
}
"""Classes whose public methods are called remotely, except _LOCAL."""

_LOCAL = {
    ("rpcmp.worker.stage", "Stage.vitals"),
    ("rpcmp.worker.optimizer", "StageOptimizer.step_now"),
    ("rpcmp.worker.optimizer", "StageOptimizer.parts"),
    ("rpcmp.worker.optimizer", "StageOptimizer.restore"),
    ("rpcmp.data.batch_server", "BatchServer.load"),
    ("rpcmp.data.batch_server", "BatchServer.clear"),
}
"""Methods that only their own process calls."""

_PLAIN = {
    "builtins": {"complex", "bytearray", "set", "frozenset", "range", "slice"}
    | {
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)  # in a RemoteException
    },
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "torch": {"Size", "device"},
    "torch.distributed.rpc.internal": {"PythonUDF", "RemoteException", "_InternalRPCPickler"},
}

_RECEIVERS = {"_tensor_receiver", "_py_rref_receiver"}
"""Methods that torch's pickler looks up by `getattr`, to receive tensors and references."""

_named: set[str] = set()
"""The top-level modules of the job's own code."""

_imported = _DATA | {module for module, _ in _CALLED}
"""Modules that a message may cause to be imported."""


def allow(modules: Iterable[str], files: Iterable[str] = ()) -> None:
    """Allow named tuples of these modules, and of modules below them.

    Args:
        modules: named by the job's config; imported when a message names them.
        files: names of modules that the job ships; not imported by messages.
    """
    _imported.update(modules := list(modules))
    _named.update(module.partition(".")[0] for module in (*modules, *files))


class Method:
    """A function that a message names, and can neither call nor change while it is read."""

    __slots__ = ("function",)

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise SecurityError(f"a message changes the method {self.function.__qualname__}")

    def __setstate__(self, state: object) -> None:
        raise SecurityError(f"a message changes the method {self.function.__qualname__}")


class Unpickler(pickle.Unpickler):
    """Finds allowed names and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _receiver
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        value = _find(module, name)
        is_its_own = (
            getattr(value, "__module__", None) == module
            and getattr(value, "__qualname__", None) == name  # not what it merely imports
        )
        if is_its_own and isinstance(value, FunctionType):
            owner, _, method = name.rpartition(".")
            is_remote = (module, owner) in _CALLED and (module, name) not in _LOCAL
            if is_remote and not method.startswith("_"):
                return Method(value)
            if module == "rpcmp.rpc.transport" and name in _ENTRANCES:
                return value
        if is_its_own and isinstance(value, type):
            if module in _DATA and _is_data(value):
                return value
            if module.partition(".")[0] in _named and _is_named_tuple(value):
                return value
        if module == "torch" and isinstance(value, torch.dtype):
            return value
        raise SecurityError(f"a message names {module}.{name}, which nobody may send")


def _find(module: str, name: str) -> Any:
    """Return the object of a name; None if it does not exist or its module is not imported."""
    if module in _imported:
        importlib.import_module(module)
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _is_data(kind: type) -> bool:
    return _is_named_tuple(kind) or issubclass(kind, Enum) or dataclasses.is_dataclass(kind)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _receiver(owner: Any, name: str) -> Any:
    """The part of `getattr` that messages need. Python < 3.11.4 names members of enums by it."""
    if isinstance(owner, EnumType) and name in owner.__members__:
        return owner[name]
    if name not in _RECEIVERS:
        raise SecurityError(f"a message names the attribute {name!r}, which nobody may send")
    receive = getattr(owner, name)
    return receive if name != "_py_rref_receiver" else functools.partial(_received, receive)


def _received(receive: Callable[[Any], Any], fork: Any) -> Any:
    """Receive a reference to a Python object.

    For other types torch would look up, and compile, the name of the type.
    """
    if not isinstance(fork, tuple) or fork[-1:] != ("PyObject",):
        raise SecurityError(f"a message refers to {fork!r}, which nobody may send")
    return receive(fork)
