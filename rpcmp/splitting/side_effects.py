"""What a module's forward does besides computing, which no graph of its operations has.

    hooks of gradients, autograd.Functions      torch.export follows the forward alone
    random numbers of Python and numpy          drawn once, while the module is exported
    numbers in attributes and globals           read once, and never changed again

`observed` runs an eager forward and notes all of these, each with the place in the user's code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy.random
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

TORCH = Path(torch.__file__).parent
OWN = Path(__file__).parents[1]
OWN_FIELDS = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks, its mode."""

MAX_DEPTH, MAX_ITEMS, MAX_BYTES = 4, 1000, 2**20
"""How far into attributes a state is followed."""

CHECKPOINT = "CheckpointFunction"
"""The Function of `torch.utils.checkpoint.checkpoint` with use_reentrant=True."""


@dataclass
class SideEffects:
    """What was seen.

    Attributes:
        functions: names and places of autograd.Functions that ran.
        hooks: places at which a forward has put a hook on a tensor.
        has_checkpoints: whether activations were checkpointed in the reentrant way.
        changed: names of attributes and globals that a forward has changed, and of generators that
            it has drawn from, by what they hold: "number", "tensor", "generator", or "flag", which
            says whether a parameter is trained.
    """

    functions: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    has_checkpoints: bool = False
    changed: dict[str, str] = field(default_factory=dict)

    def add(self, other: SideEffects) -> None:
        """Note what another forward has done as well."""
        self.functions = [*dict.fromkeys([*self.functions, *other.functions])]
        self.hooks = [*dict.fromkeys([*self.hooks, *other.hooks])]
        self.has_checkpoints |= other.has_checkpoints
        self.changed |= other.changed


@contextlib.contextmanager
def observed(module: nn.Module) -> Iterator[SideEffects]:
    """Note what the forward of a module does besides computing, in this block."""
    before = _state(module)
    seen = SideEffects()
    with noted_hooks(seen):
        yield seen
    after = _state(module)
    for name, (kind, value) in after.items():
        if name in before and before[name][1] != value:
            seen.changed[name] = kind


def functions_of(outputs: Sequence[Any], entered: Sequence[Any] = ()) -> SideEffects:
    """Return which autograd.Functions of the user's are in a graph; see `function_nodes`."""
    names = [*dict.fromkeys(function_nodes(outputs, entered).values())]
    return SideEffects(
        functions=[name for name in names if name != CHECKPOINT],
        has_checkpoints=CHECKPOINT in names,
    )


def function_nodes(outputs: Sequence[Any], entered: Sequence[Any] = ()) -> dict[Any, str]:
    """Return the nodes of the user's Functions in a graph, each with a name and a place.

    Torch's own reentrant checkpoint is among them, as CHECKPOINT. They are looked for in the graph:
    `Function.apply` may have another name in the user's code.

    Args:
        entered: nodes at which the graph that is of interest begins.
    """
    nodes = [each for each in _nodes(outputs, entered) if isinstance(each, BackwardCFunction)]
    kinds = _kinds() if nodes else {}
    return {node: name for node in nodes if (name := _name_of(node, kinds))}


def parameters_of(outputs: Sequence[Any]) -> list[nn.Parameter]:
    """Return the parameters that outputs depend on, wherever they are."""
    leaves = (getattr(node, "variable", None) for node in _nodes(outputs, ()))
    return [each for each in leaves if isinstance(each, nn.Parameter)]


def _nodes(outputs: Sequence[Any], entered: Sequence[Any]) -> Iterator[Any]:
    seen = set(entered)
    waiting = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def _name_of(node: BackwardCFunction, kinds: Mapping[str, Sequence[type[Function]]]) -> str:
    """Return the name and the place of a node's Function; empty if it is none of the user's."""
    name = type(node).__name__.removesuffix("Backward")
    for kind in kinds.get(name, ()):
        if name == CHECKPOINT and kind.__module__ == "torch.utils.checkpoint":
            return CHECKPOINT
        if kind.__module__.partition(".")[0] not in ("torch", "rpcmp"):
            return f"{kind.__qualname__} ({_place_of(kind)})"
    # Of `torch.library.custom_op`.
    return name if name.startswith("GeneratedBackwardFor_") else ""


def _kinds() -> dict[str, list[type[Function]]]:
    """Return all Functions that there are, by their names."""
    found: dict[str, list[type[Function]]] = {}
    waiting = Function.__subclasses__()
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.__name__, []).append(kind)
        waiting += kind.__subclasses__()
    return found


def backward_hooks(module: nn.Module) -> list[str]:
    """Return which submodules have hooks that see or change gradients."""
    return [
        f"{name or 'the module'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if has_backward_hooks(part)
    ]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that see or change gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@contextlib.contextmanager
def noted_hooks(seen: SideEffects) -> Iterator[None]:
    """Note where hooks are put on tensors in this block, other than by torch or rpcmp."""
    originals = {name: getattr(Tensor, name) for name in HOOKS}

    def noting(register: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, hook: Any) -> Any:
            if place := _own_line():
                seen.add(SideEffects(hooks=[place]))
            return register(tensor, hook)

        return call

    for name, register in originals.items():
        setattr(Tensor, name, noting(register))
    try:
        yield
    finally:
        for name, register in originals.items():
            setattr(Tensor, name, register)


def _own_line() -> str:
    """Return the line that called, "net.py:12"; empty if it is torch's."""
    caller = traceback.extract_stack(limit=3)[0]
    path = Path(caller.filename)
    return "" if {TORCH, OWN} & {*path.parents} else f"{path.name}:{caller.lineno}"


def _place_of(kind: type[Function]) -> str:
    # Not by `inspect.getsource`: it parses the file, which two threads cannot do at once.
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return (
        kind.__module__ if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    )


def _state(module: nn.Module) -> dict[str, tuple[str, Any]]:
    """Return all that a forward may change besides parameters and buffers, by name."""
    found: dict[str, tuple[str, Any]] = {
        "Python's random": ("generator", random.getstate()),
        "numpy.random": ("generator", str(numpy.random.get_state(legacy=False))),
    }
    for name, parameter in module.named_parameters():
        found[f"{name}.requires_grad"] = ("flag", parameter.requires_grad)
    kinds: dict[type, None] = {}
    for path, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in OWN_FIELDS}
        for key, value in own.items():
            found[f"{path}.{key}" if path else key] = _value(value, MAX_DEPTH)
        kinds |= dict.fromkeys(kind for kind in type(part).__mro__ if is_users_own(kind))
    for kind in kinds:
        found |= _class_state(kind)
    of_classes = [kind.__module__ for kind in kinds if kind.__module__ in sys.modules]
    for name in dict.fromkeys([*of_classes, *users_modules()]):
        for key, value in list(vars(sys.modules[name]).items()):
            if not key.startswith("__"):
                found[f"{name}.{key}"] = _value(value, 2)
                if isinstance(value, type) and value.__module__ == name:
                    found |= _class_state(value)
    return found


def _class_state(kind: type) -> dict[str, tuple[str, Any]]:
    own = [(key, value) for key, value in vars(kind).items() if not key.startswith("__")]
    return {f"{kind.__name__}.{key}": _value(value, 1) for key, value in own}


def users_modules() -> list[str]:
    """Return the names of the modules that are imported and the user's own, or a job's."""
    return [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith(OURS) and is_users(getattr(module, "__file__", None))
    ]


OURS = ("rpcmp", "tests", "_", "pytest", "conftest")
"""Beginnings of names of modules that no job's code is in, or whose counters are their own."""


def is_users_own(kind: type) -> bool:
    """Whether a class is the user's own: those of packages have counters of their own."""
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None))


@functools.cache
def is_users(path: str | None) -> bool:
    """Whether a file is the user's own, and of no package that is installed."""
    if path is None or not os.path.isabs(path):
        return False
    if Path(sysconfig.get_path("stdlib")) in Path(path).parents:
        return False
    return not {"site-packages", "dist-packages"} & {*Path(path).parts}


def _value(value: Any, depth: int) -> tuple[str, Any]:
    """Return what kind of state a value is, and something that differs once it has changed."""
    try:
        return _known_value(value, depth)
    except Exception:  # an object of the user's that cannot even be looked at
        return "number", None


def _known_value(value: Any, depth: int) -> tuple[str, Any]:
    match value:
        case float() if value != value:
            return "number", "NaN"
        case None | bool() | int() | float() | str() | bytes():
            return "number", value
        case Tensor():
            return "tensor", (id(value), value._version)
        case random.SystemRandom():  # has no state
            return "generator", None
        case random.Random():
            return "generator", value.getstate()
        case numpy.random.Generator():
            return "generator", str(value.bit_generator.state)
        case numpy.random.RandomState():
            return "generator", str(value.get_state(legacy=False))
        case torch.Generator():
            return "tensor", _state_of(value)
        case numpy.ndarray():
            return "number", (id(value), value.tobytes() if value.nbytes <= MAX_BYTES else b"")
        case ModuleType() | type() | nn.Module() | BuiltinFunctionType():
            return "number", None
        case FunctionType():  # its attributes, and defaults such as `store=[]`
            own = [*vars(value).items(), value.__defaults__, value.__kwdefaults__]
            return _several(own[:MAX_ITEMS], depth)
        case Mapping():
            return _several(list(value.items())[:MAX_ITEMS], depth)
        case list() | tuple() | set() | frozenset() | deque():
            return _several(list(value)[:MAX_ITEMS], depth)
        case _ if hasattr(value, "__next__"):
            return "number", repr(value)  # of itertools.count, where it is
        case _ if hasattr(value, "__dict__"):
            return _several(list(vars(value).items())[:MAX_ITEMS], depth)
        case _ if is_users_own(type(value)):
            slots = [
                name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())
            ]
            return _several([getattr(value, name, None) for name in slots], depth)
    return "number", None


def _state_of(generator: torch.Generator) -> bytes | None:
    """Return a generator's state; None within an export, where tensors have no numbers."""
    try:
        return bytes(generator.get_state().numpy())
    except RuntimeError:
        return None


def _several(values: list[Any], depth: int) -> tuple[str, Any]:
    if not depth:
        return "number", len(values)
    parts = [_value(each, depth - 1) for each in values]
    kinds = [kind for kind, _ in parts]
    kind = next((each for each in ("generator", "tensor") if each in kinds), "number")
    return kind, [each for _, each in parts]
