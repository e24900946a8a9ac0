"""What a layer computes, as plain data: operations of torch in order, and what they read.

A program goes to a host, or into a file, as JSON. Nothing of it is code or a pickle: operations are
named, and only torch's own can be (`aten.linear.default`), and arithmetic on sizes. Values besides
numbers, strings and lists are written as a dict with one key:

    {"of": "add_3"}        what the operation add_3 gave, an input of the program, or a tensor
    {"dtype": "int64"}     a dtype, likewise "layout" and "format" (torch.channels_last)
    {"device": ""}         the device of the stage, wherever the module was exported
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import fx, nn

from rpcmp.config import importing
from rpcmp.errors import ConfigError, one_line
from rpcmp.splitting import operations

Encoded: TypeAlias = Any
"""JSON, as above."""

REGIONS = ("no_grad", "enable_grad", "autocast")
"""Calls with a body: what lies within a `with` of the module."""

NAMESPACE = "aten"
"""Of torch's own operations. Those of other libraries may do anything at all."""

REFUSED = {
    *("from_file", "save", "load", "set_grad_enabled"),
    *("set_", "manual_seed", "seed", "initial_seed", "warn", "get_gradients"),
}
"""Operations that open files, or change what is not theirs; by name, in all of their forms."""

REFUSED_PARTS = ("unsafe", "_nested", "_sparse", "_reshape_alias", "_from_buffer")
"""In the names of operations that trust their arguments, and could reach beyond a tensor."""

MAX_EXPONENT = 64

MAX_SIZE = 2**63
"""Of a tensor's sizes and what is computed of them; numbers of Python would grow without end."""

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "npu", "hpu", "xla", "mtia", "maia")
"""Of autocast regions."""


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return arithmetic that takes numbers only: not texts, and no powers without end."""

    def call(*values: Any) -> Any:
        if not all(isinstance(value, int | float | torch.SymInt) for value in values):
            raise TypeError(f"{function.__name__} of what is no number")
        if function is operator.pow and abs(values[1]) > MAX_EXPONENT:
            raise ValueError(f"a power of {values[1]}")
        result = function(*values)
        if isinstance(result, int) and abs(result) > MAX_SIZE:
            raise ValueError(f"{function.__name__} gives more than any size")
        return result

    call.__name__ = call.__qualname__ = function.__name__
    return call


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


def _word(name: str) -> str:
    # Names end up in source that torch makes of a graph.
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name")
    return name


Word = Annotated[str, AfterValidator(_word)]


class Node(BaseModel):
    """One operation.

    Attributes:
        calls: "aten.linear.default", "operator.add", or one of REGIONS.
        body: what a region computes, of its `args`.
        where: the line of the module that it comes from, "my_model.py:12"; empty if unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Word
    calls: str
    args: list[Encoded] = Field(default_factory=list)
    kwargs: dict[Word, Encoded] = Field(default_factory=dict)
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

    inputs: list[Word]
    nodes: list[Node]
    outputs: list[Encoded]
    tensors: dict[Word, str] = Field(default_factory=dict)


Node.model_rebuild()


def name_of(target: Any) -> str | None:
    """Return the name of what a node of torch's graph calls; None if no program may call it."""
    if isinstance(target, _Operation):
        return str(target) if _is_allowed(str(target)) else None
    return _NAMES.get(target)


def name_of_kind(kind: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return "float32" of torch.float32."""
    return str(kind).removeprefix("torch.")


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
            return {"dtype": name_of_kind(value)}
        case torch.layout():
            return {"layout": name_of_kind(value)}
        case torch.memory_format():
            return {"format": name_of_kind(value)}
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
            found = vars(torch).get(what)
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
    raise ConfigError(f"{value!r} is no value of a program")


def require_bounded(program: Program) -> None:
    """Check the operations of a program that runs where none of the user's code may.

    Raises:
        ConfigError: one could do more than compute, or trusts what it is given.
    """
    for node in program.nodes:
        try:
            _require_bounded(node)
        except (ValueError, TypeError, LookupError) as error:
            line = f" (of {node.where})" if node.where else ""
            raise ConfigError(
                f"a cut module calls {node.calls!r}{line}, and a server that was started with "
                f"--no-code or --allow runs no such call for a config: {error}; start the server "
                "without them, or give `layers` of torch.nn's modules in [model]"
            ) from error
    if not all(isinstance(e, int | float) or _is_of_a_value(e) for e in program.outputs):
        raise ConfigError("a cut module passes on what is neither a tensor nor a number")


def _is_of_a_value(value: Encoded) -> bool:
    return isinstance(value, dict) and [*value] == ["of"]


def _require_bounded(node: Node) -> None:
    if node.body is not None:
        if node.calls not in REGIONS:
            raise ValueError("it has a body, as regions have")
        if not all(map(_is_of_a_value, node.args)):
            raise ValueError("a region takes values that were computed")
        for key, value in node.kwargs.items():
            is_known = {
                "device_type": value in (None, *DEVICE_TYPES),
                "dtype": value is None
                or (isinstance(value, dict) and value.get("dtype") in operations.DTYPES),
                "enabled": isinstance(value, bool),
                "cache_enabled": value is None or isinstance(value, bool),
            }
            if not is_known.get(key, False):
                raise ValueError(f"its option {key!r} is not known")
        require_bounded(node.body)
    elif node.calls not in _SIZES:
        operations.require_bounded(node.calls, node.args, node.kwargs)
    elif node.calls == "operator.getitem" and [type(each) for each in node.args] != [dict, int]:
        raise ValueError("it takes one of several results, by its number")


def compiled(
    program: Program, device: torch.device, owner: nn.Module
) -> Callable[..., tuple[Any, ...]]:
    """Return the program as a function of its inputs.

    Args:
        owner: has the program's tensors.

    Raises:
        ConfigError: it calls what no program may, or is not a whole one.
    """
    try:
        graph = _graph(program, device, owner)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"a program that is not whole: {one_line(error)}") from error
    run: Callable[..., tuple[Any, ...]] = fx.GraphModule(nn.Module(), graph).forward
    return run


def _graph(program: Program, device: torch.device, owner: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    values = {name: graph.placeholder(f"x{i}") for i, name in enumerate(program.inputs)}
    for name, path in program.tensors.items():
        values[name] = graph.call_function(_Tensor(owner, path))
    for node in program.nodes:
        args = tuple(_decode(each, values, device) for each in node.args)
        kwargs = {key: _decode(each, values, device) for key, each in node.kwargs.items()}
        values[node.name] = graph.call_function(_function(node, device), args, kwargs)
    graph.output(tuple(_decode(each, values, device) for each in program.outputs))
    graph.lint()
    return graph


class _Tensor:
    """A parameter or buffer of a module, read when it is needed: it may be another by then."""

    __name__ = __qualname__ = "tensor_of"

    def __init__(self, owner: nn.Module, path: str) -> None:
        above, _, self._name = path.rpartition(".")
        self._module = owner.get_submodule(above)
        tensors: dict[str, torch.Tensor] = dict(self._module.named_buffers(recurse=False))
        tensors.update(self._module.named_parameters(recurse=False))
        if self._name not in tensors:
            raise ConfigError(f"a layer has no tensor {path!r}")

    def __call__(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self._module, self._name)
        return tensor


def _is_allowed(name: str) -> bool:
    """Whether "namespace.operation.overload" may be called."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != NAMESPACE or parts[1] in REFUSED:
        return False
    return not any(part in parts[1] for part in REFUSED_PARTS)


def _function(node: Node, device: torch.device) -> Callable[..., Any]:
    if node.body is not None and node.calls in REGIONS:
        return _CompiledRegion(node.calls, node.body, device)
    if node.calls in _SIZES:
        of_sizes = _SIZES[node.calls]
        is_arithmetic = node.calls.startswith("operator.") and of_sizes is not operator.getitem
        return _of_numbers(of_sizes) if is_arithmetic else of_sizes
    if node.calls in _SPLITTABLE:
        return _SPLITTABLE[node.calls]
    found: Any = torch.ops
    if node.body is None and _is_allowed(node.calls):
        for part in node.calls.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, _Operation) or str(found) != node.calls:
        raise ConfigError(f"no program may call {node.calls!r}")
    return operations.checked(node.calls, found) if importing.is_restricted() else found


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


class _CompiledRegion:
    """A `with` of the module, and what is computed within it."""

    __name__ = __qualname__ = "region"

    def __init__(self, kind: str, body: Program, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._run = compiled(body, device, nn.Module())

    def __call__(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        with self._context(**options):
            return self._run(*args)

    def _context(self, device_type: str | None = None, **options: Any) -> Any:
        if self._kind == "autocast":
            return torch.autocast(device_type or self._device.type, **options)
        return torch.set_grad_enabled(self._kind == "enable_grad")
