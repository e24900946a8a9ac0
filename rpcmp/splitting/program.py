"""What a layer computes, as plain data: operations of torch in order, and what they read.

A program goes to a host, or into a file, as JSON. Nothing of it is code or a pickle: operations are
named, and only torch's own can be (`aten.linear.default`), and arithmetic on sizes. Values besides
numbers, strings and lists are written as a dict with one key:

    {"of": "add_3"}        what the operation add_3 gave, an input of the program, or a tensor
    {"dtype": "int64"}     a dtype, likewise "layout" and "format" (torch.channels_last)
    {"device": ""}         the device of the stage, wherever the module was exported
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import BaseModel, ConfigDict, Field
from torch import fx

from rpcmp.errors import ConfigError

Encoded: TypeAlias = Any
"""JSON, as above."""

REGIONS = ("no_grad", "enable_grad", "autocast")
"""Calls with a body: what lies within a `with` of the module."""

NAMESPACE = "aten"
"""Of torch's own operations. Those of other libraries may do anything at all."""

REFUSED = ("aten.from_file.default",)
"""Operations that open a file."""

_SIZES: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg"),
            *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum")
    },
}
"""Arithmetic on sizes, by name."""

_NAMES = {function: name for name, function in _SIZES.items()}

_Operation = type(torch.ops.aten.add.Tensor)


class Node(BaseModel):
    """One operation.

    Attributes:
        calls: "aten.linear.default", "operator.add", or one of REGIONS.
        body: what a region computes, of its `args`.
        where: the line of the module that it comes from, "my_model.py:12"; empty if unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    calls: str
    args: list[Encoded] = Field(default_factory=list)
    kwargs: dict[str, Encoded] = Field(default_factory=dict)
    body: Program | None = None
    where: str = ""


class Program(BaseModel):
    """Operations in the order of their computation.

    Attributes:
        inputs: names of the values that come from the layer before, in order.
        tensors: names of the parameters and buffers in the unsplit model, by name in the program.
        outputs: what goes to the layer after, in order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[str]
    nodes: list[Node]
    outputs: list[Encoded]
    tensors: dict[str, str] = Field(default_factory=dict)


Node.model_rebuild()


def name_of(target: Any) -> str | None:
    """Return the name of what a node of torch's graph calls; None if no program may call it."""
    if isinstance(target, _Operation):
        name = str(target)
        return name if name.startswith(f"{NAMESPACE}.") and name not in REFUSED else None
    return _NAMES.get(target)


def encode(value: Any) -> Encoded:
    """Return an argument of a node of torch's graph as JSON."""
    match value:
        case fx.Node():
            return {"of": value.name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.layout():
            return {"layout": str(value).removeprefix("torch.")}
        case torch.memory_format():
            return {"format": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": ""}
        case slice():
            return {"slice": [encode(each) for each in (value.start, value.stop, value.step)]}
        case tuple() | list():
            return [encode(each) for each in value]
    raise ConfigError(f"an operation's argument is {type(value).__name__}, which has no form here")


def _decode(value: Encoded, values: dict[str, fx.Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(each, values, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    match kind:
        case "of":
            return values[what]
        case "device":
            return device
        case "float":
            return float(what)
        case "slice":
            return slice(*(_decode(each, values, device) for each in what))
        case "dtype" | "layout" | "format":
            found = getattr(torch, what)
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
    raise ConfigError(f"{value!r} is no value of a program")


def compiled(program: Program, device: torch.device) -> Callable[..., tuple[Any, ...]]:
    """Return the program as a function of a module with its tensors, and of its inputs.

    Raises:
        ConfigError: it calls what no program may.
    """
    graph = fx.Graph()
    owner = graph.placeholder("owner")
    values = {name: graph.placeholder(name) for name in program.inputs}
    for name, path in program.tensors.items():
        values[name] = graph.call_function(_tensor, (owner, path))
    for node in program.nodes:
        args = tuple(_decode(each, values, device) for each in node.args)
        kwargs = {key: _decode(each, values, device) for key, each in node.kwargs.items()}
        values[node.name] = graph.call_function(_function(node, device), args, kwargs)
    graph.output(tuple(_decode(each, values, device) for each in program.outputs))
    graph.lint()
    run: Callable[..., tuple[Any, ...]] = fx.GraphModule(torch.nn.Module(), graph).forward
    return run


def _tensor(owner: Any, path: str) -> torch.Tensor:
    for part in path.split("."):
        owner = getattr(owner, part)
    tensor: torch.Tensor = owner
    return tensor


def _function(node: Node, device: torch.device) -> Callable[..., Any]:
    if node.body is not None:
        return _Region(node, device)
    if node.calls in _SIZES:
        return _SIZES[node.calls]
    if node.calls in _SPLITTABLE:
        return _SPLITTABLE[node.calls]
    found: Any = torch.ops
    if node.calls.startswith(f"{NAMESPACE}.") and node.calls not in REFUSED:
        for part in node.calls.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, _Operation):
        raise ConfigError(f"no program may call {node.calls!r}")
    function: Callable[..., Any] = found
    return function


def _late(name: str) -> Callable[..., Any]:
    """Return a call of `torch.nn.functional`, whose functions zero-bubble replaces later."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(F, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"late_{name}"
    return call


_SPLITTABLE = {
    "aten.linear.default": _late("linear"),
    **{f"aten.conv{n}d.default": _late(f"conv{n}d") for n in (1, 2, 3)},
}
"""Operations by which a module calls a function of `torch.nn.functional` that can be split."""


class _Region:
    """A `with` of the module, and what is computed within it."""

    def __init__(self, node: Node, device: torch.device) -> None:
        assert node.body is not None
        self.__name__ = self.__qualname__ = f"{node.calls}_{node.name}"
        self.__module__ = __name__
        self._calls, self._options, self._device = node.calls, node.kwargs, device
        self._run = compiled(node.body, device)

    def __call__(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        with self._context(**options):
            return self._run(None, *args)

    def _context(self, **options: Any) -> Any:
        if self._calls == "autocast":
            return torch.autocast(self._device.type, **options)
        return torch.set_grad_enabled(self._calls == "enable_grad")
