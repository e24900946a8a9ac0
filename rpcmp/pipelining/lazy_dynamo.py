"""Import `torch._dynamo` only when something is compiled, and not for every optimizer.

Torch's optimizers import the front end of `torch.compile` when they are made, to keep out of its
graphs, and again at each step: 800 modules, and as much time as `import torch` itself. What they
use of it does nothing unless something is being compiled. So `import torch._dynamo` is deferred: it
gives a module with these two functions, which becomes the real one when any other attribute is
used, as `torch.compile` does.

    optimizer.step() ──import torch._dynamo──> deferred: graph_break(), disable()
    torch.compile(f) ──torch._dynamo.optimize──> the real one takes its place, everywhere

What we rely on in torch is pinned down by tests/unit/pipelining/test_lazy_dynamo.py.
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

NAME = "torch._dynamo"


def defer() -> None:
    """Defer the import in this process and its forks, unless it has been done."""
    if NAME not in sys.modules and _FINDER not in sys.meta_path:
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
            raise AttributeError(name)  # who looks through sys.modules wants nothing of it
        return getattr(_FINDER.real(), name)


class _Finder(MetaPathFinder, Loader):
    """Finds and loads torch._dynamo and its submodules.

    Attributes:
        has_imported: whether the real module has been imported.
    """

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
                sys.modules.pop(NAME, None)
                vars(torch).pop("_dynamo", None)
                try:
                    self._real = importlib.import_module(NAME)
                finally:
                    self._is_importing = False
        return sys.modules[NAME]  # as far as it has come, for what it imports itself

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `fullname` if this finder loads it."""
        if fullname == NAME and not self._is_importing and not self.has_imported:
            return ModuleSpec(fullname, self)
        if fullname.startswith(f"{NAME}.") and fullname in sys.modules:
            # Asked for by who has found the deferred one, and imported with the real one meanwhile.
            return ModuleSpec(fullname, self, loader_state=sys.modules[fullname].__spec__)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a new deferred module, or a submodule that has been imported already."""
        return ModuleType(spec.name) if spec.name == NAME else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Make the former a `_Deferred`; give the latter its own spec back."""
        if module.__name__ == NAME:
            module.__class__ = _Deferred
        elif (spec := module.__spec__) is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


_FINDER = _Finder()
