"""Every operation that a host without code runs, called with hostile arguments in this process.

    python -m tests.support.hostilecalls SEED CALLS LOG [OPERATION ...]

Sizes are negative, huge or none, dtypes mixed, memory overlapping, indices out of range. The
process may crash, so the call is in LOG before it is made. It prints how many operations there are,
and which of them no call got through.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcmp.splitting import operations

MEMORY = 8 * 2**30
"""Address space of the process: what wants more gets an error, as torch's allocator gives it."""

DTYPES = [getattr(torch, name) for name in sorted(operations.DTYPES)]
SIZES = (0, 1, -1, 2, 3, -2, 7, 100, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 2**63 - 1)
NUMBERS = (0, 1, -1, 2, 0.5, -0.5, float("nan"), float("inf"), True, 2**62, -3, 1e300)
EQUATIONS = ("ij,jk->ik", "...", "a->", "ab,bc", "", "->", "aa", "a,b,c->abc", "x" * 50)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def calls() -> dict[str, Callable[..., Any]]:
    """Return all operations that are allowed, by name, as a program calls them."""
    found: dict[str, Callable[..., Any]] = {}
    for base in sorted({*operations.ALLOWED, *(f"{name}_" for name in operations.ALLOWED)}):
        packet = getattr(torch.ops.aten, base, None)
        for overload in () if packet is None else packet.overloads():
            name = f"aten.{base}.{overload}"
            if operations.kinds_of(name) is not None:
                found[name] = operations.checked(name, getattr(packet, overload))
    return found


class Drawn:
    """Draws hostile arguments."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._calm: tuple[torch.dtype, int] | None = None
        torch.manual_seed(seed)

    def arguments(self, name: str) -> dict[str, Any]:
        """Return arguments for an operation, without some that have a default.

        Half of the time they are of one dtype and of few sizes, so that kernels are reached, but
        for one of them at most.
        """
        draw = self.random
        self._calm = None
        if draw.random() < 0.6:
            self._calm = draw.choice(DTYPES[:1] + 9 * [torch.float32]), draw.choice([1, 2, 3, 4, 5])
        chosen = [
            each
            for each in schema_of(name).arguments
            if not each.has_default_value() or draw.random() < 0.5
        ]
        if name.split(".")[1] in operations.RECURRENT and draw.random() < 0.7:
            return dict(zip(operations.kinds_of(name) or {}, self._recurrent(name), strict=True))
        made = {each.name: self.argument(str(each.real_type), each.name) for each in chosen}
        if self._calm is not None and made and draw.random() < 0.5:
            self._calm = None
            each = draw.choice(chosen)
            made[each.name] = self.argument(str(each.real_type), each.name)
        return made

    def argument(self, kind: str, key: str) -> Any:
        draw = self.random
        if kind.startswith("Optional["):
            inner = kind[len("Optional[") : -1]
            return None if draw.random() < 0.4 else self.argument(inner, key)
        if kind.startswith("List["):
            count = draw.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])
            if self._calm is not None:
                count = max(1, self._calm[1] - 2) if "int" in kind else 2
            return [self.argument(kind[len("List[") : -1], key) for _ in range(count)]
        match kind:
            case "Tensor":
                return self.tensor()
            case "int":
                if self._calm is not None:
                    return draw.choice([1, 1, 1, 1, 2, 2, 0, 3, -1])
                return draw.choice(SIZES if draw.random() < 0.35 else (0, 1, 1, 2, 3, -1, 4, -2))
            case "bool":
                return draw.random() < 0.5
            case "str":
                return self._text(key)
            case "ScalarType":
                return draw.choice(DTYPES)
            case "MemoryFormat":
                return draw.choice(FORMATS)
            case "Layout":
                return torch.strided
            case "Device":
                return torch.device("cpu")
            case "Generator":
                return None
        return draw.choice(NUMBERS) if kind == "number" else float(draw.choice(NUMBERS))

    def tensor(self) -> Tensor:
        """Return one of few elements, maybe with indices that lie outside of anything."""
        draw = self.random
        if self._calm is not None:
            dtype, dims = self._calm
            shape = [
                draw.choice([1, 1, 2]) for _ in range(dims - draw.choice([*[0] * 15, 1, 2, 3]))
            ]
            index = torch.randint(0, 2, shape)
            return draw.choice([index, index > 0]) if draw.random() < 0.1 else index.to(dtype)
        dtype = draw.choice(DTYPES if draw.random() < 0.3 else [torch.float32, torch.int64])
        shape = [
            draw.choice([0, 1, 1, 2, 3, 4, 5, 8])
            for _ in range(draw.choice([0, 1, 2, 2, 3, 3, 4, 5]))
        ]
        if dtype.is_floating_point or dtype.is_complex:
            made = torch.randn(shape).to(dtype)
            if draw.random() < 0.15:
                made = torch.full(shape, draw.choice([float("nan"), float("inf"), 6e4])).to(dtype)
        elif draw.random() < 0.6:
            made = torch.randint(-3, 6, shape).to(dtype)
        else:
            limits = torch.iinfo(dtype) if dtype is not torch.bool else None
            extremes = [0, 1] if limits is None else [limits.min, limits.max, 0, 100]
            made = torch.full(shape, draw.choice(extremes), dtype=dtype)
        made = self._overlapping(made)
        return made.requires_grad_() if made.is_floating_point() and draw.random() < 0.05 else made

    def _overlapping(self, made: Tensor) -> Tensor:
        kind = self.random.random()
        if kind < 0.15 and made.dim() >= 2:
            return made.transpose(0, -1)
        if kind < 0.25 and made.dim() and made.shape[0]:
            return made[:1].expand(4, *made.shape[1:])
        if kind < 0.3 and made.dim():
            return made[::2]
        return made

    def _text(self, key: str) -> str:
        if key == "equation":
            return self.random.choice(EQUATIONS)
        return self.random.choice(operations.STRINGS[key].split("|"))

    def _recurrent(self, name: str) -> list[Any]:
        """Return tensors of a recurrent layer that fit each other, or nearly so."""
        draw = self.random
        gates = operations.RECURRENT[name.split(".")[1]]
        size, hidden, samples, layers = (draw.choice([1, 2, 3]) for _ in range(4))
        both, biases = draw.random() < 0.5, draw.random() < 0.5
        weights: list[list[int]] = []
        for layer in range(layers):
            own = (1 + both) * hidden if layer else size
            shapes = [[gates * hidden, own], [gates * hidden, hidden]]
            weights += (1 + both) * (shapes + [[gates * hidden]] * (2 * biases))
        state = [layers * (1 + both), samples, hidden]
        everything = [[2, samples, size], state, state, *weights]
        if draw.random() < 0.7:
            broken = draw.choice(everything)
            broken[draw.randrange(len(broken))] += draw.choice([-1, 1, 2])
        made = [torch.randn([max(0, each) for each in shape]) for shape in everything]
        if draw.random() < 0.1:
            made[draw.randrange(len(made))] = self.tensor()
        inputs, first, second, *rest = made
        states = [first, second] if gates == 4 else first
        return [inputs, states, rest, biases, layers, 0.0, draw.random() < 0.5, both, False]


def schema_of(name: str) -> Any:
    """Return torch's schema of an operation."""
    _, base, overload = name.split(".")
    return operations.schema_of(getattr(getattr(torch.ops.aten, base), overload))


def _called(
    operation: Callable[..., Any],
    arguments: Sequence[Any],
    values: dict[str, Any],
    draw: random.Random,
) -> Any:
    """Call an operation with the arguments that are given, some or all of the first by place."""
    given = itertools.takewhile(lambda each: each.name in values and not each.kwarg_only, arguments)
    first = [each.name for each in given]
    if draw.random() < 0.3:
        first = first[: draw.randrange(len(first) + 1)]
    names = [key for key in values if key not in first]
    draw.shuffle(names)
    return operation(*(values[name] for name in first), **{name: values[name] for name in names})


def call_all(seed: int, count: int, log: Path, only: Sequence[str]) -> dict[str, Any]:
    """Call each operation `count` times."""
    drawn, through, every = Drawn(seed), set(), calls()
    chosen = [name for name in every if not only or any(re.match(each, name) for each in only)]
    with log.open("w", encoding="utf-8") as file:
        for name in chosen:
            arguments = schema_of(name).arguments
            for _ in range(count):
                values = drawn.arguments(name)
                file.seek(0)
                file.truncate()
                file.write(f"{name} {values}")
                file.flush()
                with contextlib.suppress(Exception):
                    result = _called(every[name], arguments, values, drawn.random)
                    through.add(name)
                    if isinstance(result, Tensor) and result.requires_grad and result.numel():
                        result.sum().backward()
    return {"operations": len(chosen), "never": sorted(set(chosen) - through)}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    seed, count, log, *only = sys.argv[1:]
    print(json.dumps(call_all(int(seed), int(count), Path(log), only)))
