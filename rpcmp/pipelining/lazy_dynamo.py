"""Optimizers without `torch._dynamo`, the front end of `torch.compile`, until it is needed.

Torch's optimizers import it when they are made, to keep out of its graphs, and again at each step:
800 modules, and as much time as `import torch` itself. What they use of it does nothing unless
something is being compiled. So `defer_dynamo` defers the import. It gives a module with two
functions, which the real one replaces when any other attribute is used.

    optimizer.step() ──import torch._dynamo──> deferred: graph_break(), disable()
    torch.compile(f) ──torch._dynamo.optimize──> the real one takes its place, everywhere

tests/unit/pipelining/test_lazy_dynamo.py pins down what this relies on in torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

DYNAMO = "torch._dynamo"


def defer_dynamo() -> None:
    """Defer the import in this process and its forks, unless it has been done."""
    if DYNAMO not in sys.modules and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Deferred(ModuleType):
    """Stands in for torch._dynamo until more of it is needed than this."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being compiled, so there is no graph to break."""
        if _FINDER.has_imported:
            _FINDER.real().graph_break(msg)

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return `fn`, kept out of graphs once there may be any.

        Only functions are deferred. The results for classes, modules and calls without an argument
        (decorators, contexts) are not functions, so the real module makes them.
        """
        if not isinstance(fn, FunctionType | MethodType):
            return _FINDER.real().disable(fn, recursive, **options)
        kept_out: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _FINDER.has_imported:
                return fn(*args, **kwargs)
            if not kept_out:
                kept_out.append(_FINDER.real().disable(fn, recursive, **options))
            return kept_out[0](*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # code that looks through sys.modules needs none of it
        return getattr(_FINDER.real(), name)


class _Finder(MetaPathFinder, Loader):
    """Finds and loads torch._dynamo and its submodules."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_importing = False
        self._real: ModuleType | None = None

    @property
    def has_imported(self) -> bool:
        return self._real is not None

    def real(self) -> ModuleType:
        """Return the real module, imported the first time; other threads wait meanwhile."""
        with self._lock:
            if self._real is None and not self._is_importing:
                self._is_importing = True
                sys.modules.pop(DYNAMO, None)
                vars(torch).pop("_dynamo", None)
                try:
                    self._real = importlib.import_module(DYNAMO)
                finally:
                    self._is_importing = False
        return sys.modules[DYNAMO]  # as far as it has come, for what it imports itself

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == DYNAMO and not self._is_importing and not self.has_imported:
            return ModuleSpec(fullname, self)
        if fullname.startswith(f"{DYNAMO}.") and fullname in sys.modules:
            # Imported through the deferred module, and with the real one meanwhile.
            return ModuleSpec(fullname, self, loader_state=sys.modules[fullname].__spec__)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a new deferred module, or a submodule that has been imported already."""
        return ModuleType(spec.name) if spec.name == DYNAMO else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Make the former a `_Deferred`; give the latter its own spec back."""
        if module.__name__ == DYNAMO:
            module.__class__ = _Deferred
        elif (spec := module.__spec__) is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


_FINDER = _Finder()
