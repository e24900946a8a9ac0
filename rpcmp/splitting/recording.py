"""Note what a module's parts are called with, and what its forwards do, while it is exported.

An export calls the module's own Python with tensors that have shapes and no numbers, so this costs
neither time nor memory, however large the module is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import one_line
from rpcmp.splitting.side_effects import SideEffects, function_nodes, observed


@dataclass(frozen=True)
class Shape:
    """A tensor that a part was called with.

    Attributes:
        is_free: which of its sizes the module has not fixed before.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    is_free: tuple[bool, ...]


@dataclass(frozen=True)
class FreeSize:
    """A size that a part was called with, which the module has not fixed before."""

    value: int


@dataclass(frozen=True)
class PartCall:
    """What a part was called with in training: shapes, sizes, and what is plain."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Recording:
    """What was noted.

    Attributes:
        calls: the first call of each part, by its name; the module's own is "".
        functions: the nodes of the user's Functions in these calls, each with a name and a place.
        forwards: what each forward of the module did besides computing, in order.
        unseen: why that could not be noted of some forward; empty if it could.
    """

    calls: dict[str, PartCall] = field(default_factory=dict)
    functions: dict[str, dict[Any, str]] = field(default_factory=dict)
    forwards: list[SideEffects] = field(default_factory=list)
    unseen: str = ""


@contextlib.contextmanager
def recorded(module: nn.Module) -> Iterator[Recording]:
    """Note all forwards of a module in this block."""
    recording, whole = Recording(), contextlib.ExitStack()

    def begin(*_: object) -> None:
        try:
            recording.forwards.append(whole.enter_context(observed(module)))
        except Exception as error:  # of a state that cannot be read within an export
            recording.unseen = one_line(error)

    def end(*_: object) -> None:
        try:
            whole.close()
        except Exception as error:
            recording.unseen = one_line(error)

    with contextlib.ExitStack() as hooks:
        hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
        hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        for name, part in module.named_modules():
            note = _Note(recording, name)
            hooks.callback(part.register_forward_pre_hook(note.begin, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(note.end, with_kwargs=True).remove)
        try:
            yield recording
        finally:
            end()


@dataclass
class _Note:
    """Hooks that note the first call of a part."""

    recording: Recording
    name: str
    entered: list[Any] = field(default_factory=list)

    def begin(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.name not in self.recording.calls:
            self.recording.calls[self.name] = PartCall(tuple(map(shape_of, args)), shape_of(kwargs))
            self.entered = [each.grad_fn for each in _tensors((args, kwargs))]

    def end(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if self.name not in self.recording.functions:
            nodes = function_nodes([*_tensors(outputs)], self.entered)
            self.recording.functions[self.name] = nodes


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


ANY_SIZE = 4
"""In place of a size that hangs on numbers, of which an export has none."""


def shape_of(value: Any) -> Any:
    """Return a value with shapes in place of its tensors.

    What is neither plain nor made of such values, a cache for one, becomes None: a part is called
    without it.
    """
    match value:
        case Tensor():
            is_free = tuple(not isinstance(size, int) for size in value.shape)
            return Shape(value.dtype, tuple(map(_hint, value.shape)), is_free)
        case torch.SymInt():
            return FreeSize(_hint(value))
        case bool() | int() | float() | complex() | str() | torch.dtype() | torch.device() | None:
            return value
        case dict():
            return {key: shape_of(each) for key, each in value.items()}
        case list():
            return [shape_of(each) for each in value]
        case tuple():
            parts = map(shape_of, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return None


def _hint(size: int | torch.SymInt) -> int:
    """Return what a size is in this call; as a plain number, int() would fix it for the export."""
    if isinstance(size, int):
        return size
    hint: Any = size.node.hint if size.node.has_hint() else ANY_SIZE
    return int(hint)
