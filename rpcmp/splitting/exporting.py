"""Follow a module's forward with `torch.export`: the graph of what it computes, in one mode.

Every size of the inputs may vary unless the module fixes it: torch finds out which do. Parameters
are never read, so they need no values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule

from rpcmp.errors import ConfigError, one_line

BY_HAND = "cut it by hand: give `layers` in [model], or stages with a `module` each"
"""What is left to the author of a module that cannot be cut."""

Structure: TypeAlias = Any
"""What a module returns, as JSON: None, an output's number, or one of

    {"tuple": [...]}, {"list": [...]}, {"dict": [[key, ...], ...]}, {"is": a number, text or flag}

and of what has names: {"fields": ...} like "dict", and {"named": [[name, ...], ...]}, a named tuple
"""

OWNER = "module"
"""The module's name within the one that is exported."""


@dataclass(frozen=True)
class ExportedGraph:
    """A module's graph in one mode.

    Attributes:
        program: torch's.
        structure: where the graph's outputs stand in what the module returns.
        guards: what has to hold for the sizes of the inputs, see `rpcmp.splitting.guards`.
    """

    program: ExportedProgram
    structure: Structure
    guards: list[str]


def export(
    module: nn.Module, batch: Any, training: bool, autocast: torch.dtype | None = None
) -> ExportedGraph:
    """Return the graph of a module.

    Args:
        batch: what the module is called with: a tensor; a tuple of arguments; or a dict of keyword
            arguments. Two samples at least; sizes that are equal by chance may be taken to be one.
        autocast: the dtype of the `torch.autocast` that will be around the call.

    Raises:
        ConfigError: it cannot be exported, or takes or returns something else than tensors.
    """
    try:
        try:
            return _export(module, batch, training, autocast, tells=False)
        except ConfigError:
            raise
        except Exception:  # it may have another way for an export, which it has to be told of
            return _export(module, batch, training, autocast, tells=True)
    except ConfigError:
        raise
    except Exception as error:
        mode = "training" if training else "evaluation"
        raise ConfigError(
            f"{type(module).__name__} cannot be exported for {mode}: {one_line(error)}\n{BY_HAND}"
        ) from error


def _export(
    module: nn.Module, batch: Any, training: bool, autocast: torch.dtype | None, tells: bool
) -> ExportedGraph:
    """Export a module; `tells` says whether it may know that it is exported."""
    names, leaves = arguments(batch)
    whole = _Flat(module, names, tells)
    whole.train(training)
    sizes = tuple(
        {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != 1}  # no size to torch
        for leaf in leaves
    )
    with (
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
        _counted_autocasts(whole.seen),
    ):
        warnings.simplefilter("ignore")  # a size that the module fixes, such as 3 channels
        program = torch.export.export(
            whole, tuple(leaves), dynamic_shapes={"leaves": sizes}, strict=False
        )
    _require_plain(program)
    _require_all_regions(program, whole.seen.autocasts)
    structure = _with_fixed_sizes(whole.seen.structure, program)
    # A private name: ExportedProgram.range_constraints has no more than the least and most.
    return ExportedGraph(program, structure, program._guards_code)


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Let a module not know that it is exported: some compute otherwise then, in other bits.

    Attention of transformers, for one, makes a mask that it does without when it is run.
    """
    known = {name: getattr(torch.compiler, name) for name in ("is_compiling", "is_exporting")}
    for name in known:
        setattr(torch.compiler, name, lambda: False)
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(torch.compiler, name, function)


TENSORS = (
    InputKind.USER_INPUT,
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
)


@contextlib.contextmanager
def _counted_autocasts(seen: _Seen) -> Iterator[None]:
    """Count how often the module enters `torch.autocast`."""
    enter: Callable[[torch.autocast], Any] = torch.autocast.__enter__

    def counting(region: torch.autocast) -> Any:
        seen.autocasts += 1
        return enter(region)

    setattr(torch.autocast, "__enter__", counting)  # noqa: B010  # for mypy no method is a variable
    try:
        yield
    finally:
        setattr(torch.autocast, "__enter__", enter)  # noqa: B010


def _require_all_regions(program: ExportedProgram, autocasts: int) -> None:
    """Refuse a graph that has lost a region, as torch's do of gradients within autocast.

    The region around it then comes in several parts.
    """
    graphs = [
        each.graph for each in program.graph_module.modules() if isinstance(each, GraphModule)
    ]
    names = [getattr(node.target, "__name__", "") for graph in graphs for node in graph.nodes]
    if names.count("wrap_with_autocast") > autocasts:
        raise ConfigError(
            "the module enters torch.no_grad() or torch.enable_grad() within torch.autocast(), "
            f"which torch.export leaves out: enter torch.autocast() within it, or {BY_HAND}"
        )


def _require_plain(program: ExportedProgram) -> None:
    """Refuse what a graph reads or writes besides tensors and its outputs."""
    signature = program.graph_signature
    others = [spec.kind.name for spec in signature.input_specs if spec.kind not in TENSORS]
    others += [s.kind.name for s in signature.output_specs if s.kind is not OutputKind.USER_OUTPUT]
    if others:
        raise ConfigError(
            f"the module has what no layer can: {', '.join(sorted(set(others)))}; {BY_HAND}"
        )


def arguments(batch: Any) -> tuple[list[str], list[Tensor]]:
    """Return the names and values of a batch's arguments; positional ones have numbers."""
    if isinstance(batch, Mapping):
        named = {str(key): value for key, value in batch.items()}
    else:
        each = batch if isinstance(batch, tuple | list) else [batch]
        named = {str(index): value for index, value in enumerate(each)}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"input {name!r} is {type(value).__name__}, not a tensor")
    return list(named), list(named.values())


def restore(structure: Structure, values: Sequence[Any]) -> Any:
    """Return what the module returns, of the graph's outputs.

    Raises:
        ConfigError: it is no structure.
    """
    match structure:
        case None:
            return None
        case int():
            return values[structure]
        case {"is": value}:
            return value
        case {"tuple": parts}:
            return tuple(restore(each, values) for each in parts)
        case {"list": parts}:
            return [restore(each, values) for each in parts]
        case {"dict": pairs} | {"fields": pairs}:
            return {key: restore(each, values) for key, each in pairs if each != ABSENT}
        case {"named": pairs}:
            return tuple(restore(each, values) for _, each in pairs)
        case {"without": [_, part]}:
            return restore(part, values)
    raise ConfigError(f"{structure!r} is nothing that a module returns")


ABSENT: Structure = {"is": "absent"}
"""Of a field that a module's output class has, and that is None in this mode: it is no item."""


class Fields(dict[Any, Any]):
    """What transformers return: a dict whose items are attributes, and have positions, as well."""

    def __init__(self, items: Iterable[tuple[str, Any]], absent: Iterable[str]) -> None:
        super().__init__(items)
        vars(self).update(dict.fromkeys(absent))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r} in {', '.join(map(str, self))}")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def as_returned(structure: Structure, value: Any) -> Any:
    """Return a restored value with the names that the module gives its parts.

    A loss may read `outputs.logits`, or `getattr(outputs, "scale", 1.0)`, which in a plain dict or
    tuple would be another number without a word.
    """
    match structure:
        case {"tuple": parts}:
            return tuple(itertools.starmap(as_returned, zip(parts, value, strict=True)))
        case {"list": parts}:
            return list(itertools.starmap(as_returned, zip(parts, value, strict=True)))
        case {"dict": pairs}:
            return {key: as_returned(each, value[key]) for key, each in pairs}
        case {"fields": pairs}:
            there = [(key, as_returned(each, value[key])) for key, each in pairs if each != ABSENT]
            return Fields(there, (key for key, each in pairs if each == ABSENT))
        case {"named": pairs}:
            parts = [as_returned(*pair) for pair in zip((s for _, s in pairs), value, strict=True)]
            return _class_with(tuple(name for name, _ in pairs))(*parts)
        case {"without": [names, part]}:
            return _without(names, as_returned(part, value))
    return value


# Classes are made once, not for each micro-batch.
@functools.lru_cache
def _class_with(names: tuple[str, ...]) -> Callable[..., Any]:
    return collections.namedtuple("Outputs", names, rename=True)


def _without(names: Sequence[str], value: Any) -> Any:
    """Return outputs of which a loss cannot read some names: not even with a default."""
    base: type = type(value)
    kind = _class_without(base, tuple(names))
    if isinstance(value, tuple):
        return tuple.__new__(kind, value)
    outputs = dict.__new__(kind)
    outputs.update(value)
    if isinstance(value, Fields):
        vars(outputs).update(vars(value))
    return outputs


@functools.lru_cache
def _class_without(kind: Any, names: tuple[str, ...]) -> type[Any]:
    def refused(name: str) -> property:
        def read(outputs: object) -> Any:
            raise ConfigError(
                f"outputs.{name} is a property of a class of the module's, which a layer that was "
                "cut out of it does not return: return it as a field or an item"
            )

        return property(read)

    return type("Outputs", (kind,), {name: refused(name) for name in names})


class _Seen:
    """What a trace has seen. Not an attribute of the module: export sets those back."""

    structure: Structure = None
    autocasts: int = 0


class _Flat(nn.Module):
    """A module between flat inputs and flat outputs; `seen` says where these belong."""

    def __init__(self, module: nn.Module, names: Sequence[str], tells: bool) -> None:
        super().__init__()
        self.module = module
        self._names, self._tells = names, tells
        self.seen = _Seen()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self._names, leaves, strict=True))
        positional = [named.pop(name) for name in self._names if name.isdecimal()]
        before = dict(self.module.named_buffers())
        with contextlib.nullcontext() if self._tells else _untold():
            outputs = self.module(*positional, **named)
        self.seen.structure, found = flatten(outputs)
        after = dict(self.module.named_buffers())
        if replaced := [name for name, buffer in before.items() if after.get(name) is not buffer]:
            raise ConfigError(
                f"the module's forward replaces its buffer {replaced[0]!r}, which no graph shows: "
                f"change it in place, as in `self.{replaced[0]}.copy_(...)`"
            )
        return tuple(found)


PLAIN = (bool, int, float, str)
"""What stands for itself in what a module returns, and as a key of it."""


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """Return the structure of what a module returns, and its tensors and sizes in order."""
    found: list[Any] = []
    return _structure(value, found), found


def plain(value: Any) -> Any:
    """Return what a module returns as a loss gets it of a layer that was cut out of it."""
    structure, values = flatten(value)
    return as_returned(structure, restore(structure, values))


LIBRARIES = ("builtins", "collections", "typing", "torch", "transformers")
"""Whose classes of outputs have no properties that a loss reads."""


def _structure(value: Any, found: list[Any]) -> Structure:
    """Return the structure of a value, and of its class what no structure has."""
    part = _own_structure(value, found)
    if not isinstance(value, Mapping | tuple) or isinstance(value, Fields):
        return part
    own = (c for c in type(value).__mro__ if c.__module__.partition(".")[0] not in LIBRARIES)
    names = {
        name
        for c in own
        for name, each in vars(c).items()
        if isinstance(each, property | functools.cached_property)
    }
    hidden = sorted(name for name in names if not name.startswith("_"))
    return {"without": [hidden, part]} if hidden else part


def _own_structure(value: Any, found: list[Any]) -> Structure:
    """Collect a tree's tensors and sizes, and return the tree with their positions.

    A cache, or another object of some class, is left out of a dict.
    """
    match value:
        case None:
            return None
        case numpy.generic():
            return {"is": value.item()}
        case Tensor() | torch.SymInt():
            found.append(value)
            return len(found) - 1
        case bool() | int() | float() | str():
            return {"is": value}
        case Mapping():  # also transformers' outputs
            pairs = [pair for pair in value.items() if isinstance(pair[1], KEPT)]
            kind = "fields" if pairs and _are_attributes(value, pairs) else "dict"
            parts = [[_key(key), _structure(each, found)] for key, each in pairs]
            if kind == "fields":
                parts += [[key, ABSENT] for key in _fields_of(value) if key not in value]
            return {kind: parts}
        case list():
            return {"list": [_structure(each, found) for each in value]}
        case tuple() if hasattr(value, "_fields"):
            named = zip(value._fields, value, strict=True)
            return {"named": [[name, _structure(each, found)] for name, each in named]}
        case tuple():
            return {"tuple": [_structure(each, found) for each in value]}
    raise ConfigError(
        f"the module returns {type(value).__name__}: it has to return tensors, numbers and texts, "
        "or tuples, lists and dicts of them"
    )


KEPT = (Tensor, torch.SymInt, numpy.generic, complex, *PLAIN, Mapping, tuple, list, type(None))


def _are_attributes(value: Any, pairs: Sequence[tuple[Any, Any]]) -> bool:
    return all(isinstance(key, str) and getattr(value, key, None) is each for key, each in pairs)


def _fields_of(value: Any) -> list[str]:
    if isinstance(value, Fields):
        return [*vars(value)]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [field.name for field in fields if getattr(value, field.name, 0) is None]


def _key(key: Any) -> Any:
    if isinstance(key, PLAIN):
        return key
    raise ConfigError(
        f"the module returns a dict with {type(key).__name__} as a key: use texts or numbers"
    )


def _with_fixed_sizes(structure: Structure, program: ExportedProgram) -> Structure:
    """Return a structure with those sizes as numbers that the module fixes."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    places = itertools.count()
    values = [
        next(places) if isinstance(each, fx.Node) else {"is": each} for each in output.args[0]
    ]
    output.args = ([each for each in output.args[0] if isinstance(each, fx.Node)],)

    def placed(part: Structure) -> Structure:
        match part:
            case int():
                return values[part]
            case {"tuple": parts} | {"list": parts}:
                return {kind: [placed(each) for each in parts] for kind in part}
            case {"dict": pairs} | {"fields": pairs} | {"named": pairs}:
                return {kind: [[key, placed(each)] for key, each in pairs] for kind in part}
            case {"without": [names, inner]}:
                return {"without": [names, placed(inner)]}
        return part

    return placed(structure)
