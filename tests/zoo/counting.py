"""Layers that count their calls outside of themselves, and a loss that a layer reads from."""

from __future__ import annotations

import functools
import itertools
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn

from tests.zoo.surprises import filled

calls = 0
warmth = 1.0
scale: float | None = None
CYCLE = itertools.cycle([1.0, 0.5, 0.25])
TABLES: dict[int, int] = {}


class Counting(nn.Module):
    """Scales by one over how often a layer was called: by which count, says `kind`."""

    seen: ClassVar[list[int]] = []

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind, self.inner = kind, filled(nn.Linear(4, 4), seed)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if self.kind == "global":
            return y / _count()
        if self.kind == "logged":
            _count()
            return y
        if self.kind == "class":
            self.seen.append(1)
            return y / len(self.seen)
        if self.kind == "warmth":
            return y * warmth
        if self.kind == "filled":
            return y / _scale(y)
        if self.kind == "cycle":
            return y * next(CYCLE)
        TABLES.setdefault(len(x), 2)  # a cache
        return y / TABLES[len(x)]


def _scale(y: Tensor) -> float:
    global scale
    if scale is None:
        scale = float(y.abs().mean())
    return scale


def _count() -> int:
    global calls
    calls += 1
    return calls


def warming(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a squared error; layers of the kind "warmth" then give more each time."""
    global warmth
    warmth += 0.1
    return (outputs - targets).square().mean()


class Numbered(nn.Module):
    """Scales by how many were made before it."""

    made = 0

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        Numbered.made += 1
        self.number, self.share, self.inner = Numbered.made, share, filled(nn.Linear(4, 4), 1)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * (self.number + self.share)


def numbered(kind: str) -> list[tuple[str, Any]]:
    rates = [0.1, 0.2]
    if kind == "partial":
        return [(name, functools.partial(Numbered)) for name in ("first", "middle", "head")]
    return [
        ("first", lambda: Numbered(rates.pop())),
        ("middle", lambda: Numbered(rates.pop())),
        ("head", Numbered),
    ]


class Sharing(nn.Module):
    """Scales by how often it or another layer was called."""

    def __init__(self, context: dict[str, Any], seed: int) -> None:
        super().__init__()
        self.context, self.inner = context, filled(nn.Linear(4, 4), seed)

    def forward(self, x: Tensor) -> Any:
        self.context["calls"] += self.context["step"]
        return self.inner(x) / (1 + self.context["calls"])


def sharing(kind: str) -> list[tuple[str, Any]]:
    context = {"calls": 0, "step": int(kind == "counting")}
    return [
        ("first", lambda: Sharing(context, 1)),
        ("middle", lambda: Sharing(context, 2)),
        ("head", lambda: filled(nn.Linear(4, 1), 3)),
    ]


REGISTRY = SimpleNamespace(first=nn.Linear(4, 4))


def regularized(outputs: Tensor, targets: Tensor) -> Tensor:
    weight: Tensor = REGISTRY.first.weight
    return warming(outputs, targets) + weight.square().sum()


def reset() -> None:
    """Begin anew, as another process does."""
    global calls, warmth, scale
    calls, warmth, scale, Numbered.made = 0, 1.0, None, 0
    Counting.seen.clear()
    REGISTRY.first = nn.Linear(4, 4)
    TABLES.clear()


class Borrowing(nn.Module):
    """Reads the weight of another layer, which it hides from torch; "moving": and moves its own."""

    def __init__(self, others: list[Any], kind: str) -> None:
        super().__init__()
        self.others, self.kind = others, kind
        self.other = held if kind == "found" else named
        if kind == "moving":
            self.others = [filled(nn.Linear(4, 4), 5).requires_grad_(False)]

    def forward(self, x: Tensor) -> Any:
        (other,) = self.others or [self.other()]
        if isinstance(other, Tensor):
            return x @ other
        if isinstance(other, nn.BatchNorm1d):
            return x + other.running_mean  # type: ignore[operator]
        if self.kind == "moving":
            other.weight.data.mul_(0.9)
        return x @ (other.weight.detach() if self.kind == "detached" else other.weight)


def named() -> Any:
    return REGISTRY.first


def held() -> Any:
    """Return a module that nobody finds."""
    return getattr(sys.modules[__name__], "REGI" + "STRY").first


def borrowing(kind: str) -> list[tuple[str, Any]]:
    first: Any = REGISTRY.first if kind in ("global", "found") else nn.Linear(4, 4)
    if kind == "statistics":
        first = nn.BatchNorm1d(4, affine=False)
    filled(first)
    others: list[Any] = [] if first is REGISTRY.first else [first]
    if kind in ("kept", "given"):
        others = [first.weight.detach()]
    (weight,) = others or [None]
    middle = Borrowing(others, kind)
    made = {
        "given": lambda: Borrowing([weight], kind),
        "kept": lambda: middle,
    }
    return [
        ("first", lambda: first),
        ("middle", made.get(kind, lambda: Borrowing(others, kind))),
        ("head", lambda: filled(nn.Linear(4, 1), 3)),
    ]


def layers(kind: str) -> list[tuple[str, Any]]:
    return [
        ("first", lambda: Counting(kind, 1)),
        ("middle", lambda: Counting(kind, 2)),
        ("head", lambda: filled(nn.Linear(4, 1), 3)),
    ]
