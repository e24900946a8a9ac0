"""What has to hold for the sizes of a module's inputs: its graph was followed under that.

    if x.shape[1] > 6: ...                 "size(0, 1) > 6": input 0, dimension 1
    x.view(-1, 2, 4)                       "size(0, 1) % 2 == 0"
    x + y                                  "size(0, 1) == size(1, 1)"

torch writes a condition as Python. A host evaluates it by itself: arithmetic and comparisons of
sizes are all that it understands.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from rpcmp.errors import ConfigError
from rpcmp.splitting.exporting import BY_HAND

_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

MAX_LENGTH = 4096
"""Characters of a condition."""

_CALLED: dict[str, Callable[..., Any]] = {"min": min, "max": max}


def from_torch(code: str) -> str:
    """Return a condition of torch's in our words.

    Raises:
        ConfigError: it says something else than of sizes.
    """
    guard = _SIZE.sub(r"size(\1, \2)", code)
    guard = guard.replace("torch.sym_max(", "max(").replace("torch.sym_min(", "min(")
    try:
        if len(guard) > MAX_LENGTH:
            raise ValueError("it is too long")
        _evaluate(ast.parse(guard, mode="eval").body, lambda of, dimension: 1)
    except ArithmeticError:  # with other sizes than these
        pass
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"the module asks its inputs something that no host can see to: {code}; {BY_HAND}"
        ) from error
    return guard


def holds(guard: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Return whether a condition holds for inputs of these shapes.

    Raises:
        ValueError: it is none.
    """
    if len(guard) > MAX_LENGTH:
        raise ValueError(f"a condition of {len(guard)} characters")
    try:
        body = ast.parse(guard, mode="eval").body
        return bool(_evaluate(body, lambda of, dimension: shapes[of][dimension]))
    except (SyntaxError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{guard!r} is no condition") from error


def in_words(guard: str, names: Sequence[str]) -> str:
    """Return a condition with the inputs' names: "tokens.shape[1] > 6"."""

    def name(match: re.Match[str]) -> str:
        return f"{names[int(match[1])]}.shape[{match[2]}]"

    return re.sub(r"size\((\d+), (\d+)\)", name, guard)


def _evaluate(node: ast.expr, size: Callable[[int, int], int]) -> Any:
    def value(of: ast.expr) -> Any:
        return _evaluate(of, size)

    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value(operand)
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(map(value, values))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARED for op in ops
        ):
            terms = [value(each) for each in (left, *others)]
            pairs = zip(ops, terms, terms[1:], strict=False)
            return all(_COMPARED[type(op)](a, b) for op, a, b in pairs)
        case ast.Call(func=ast.Name(id="size"), args=[of, dimension]):
            return size(value(of), value(dimension))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLED and args:
            return _CALLED[name](*map(value, args))
    raise ValueError(f"{ast.unparse(node)} is no part of a condition")
