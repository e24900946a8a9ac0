"""Layers that count their calls outside of themselves, and a loss that a layer reads from."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn

from tests.zoo.surprises import filled

calls = 0
warmth = 1.0
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
        TABLES.setdefault(len(x), 2)  # a cache
        return y / TABLES[len(x)]


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
    global calls, warmth
    calls, warmth, Numbered.made = 0, 1.0, 0
    Counting.seen.clear()
    REGISTRY.first = nn.Linear(4, 4)
    TABLES.clear()


class Borrowing(nn.Module):
    """Reads the weight of another layer, which it hides from torch; "moving": and moves its own."""

    def __init__(self, others: list[nn.Linear], kind: str) -> None:
        super().__init__()
        self.others, self.kind = others, kind
        if kind == "moving":
            self.others = [filled(nn.Linear(4, 4), 5).requires_grad_(False)]  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others or [REGISTRY.first]
        if self.kind == "moving":
            other.weight.data.mul_(0.9)
        weight = other.weight.detach() if self.kind == "detached" else other.weight
        return x @ weight


def borrowing(kind: str) -> list[tuple[str, Any]]:
    first = REGISTRY.first if kind == "global" else nn.Linear(4, 4)
    filled(first)
    others = [] if kind == "global" else [first]
    return [
        ("first", lambda: first),
        ("middle", lambda: Borrowing(others, kind)),
        ("head", lambda: filled(nn.Linear(4, 1), 3)),
    ]


def layers(kind: str) -> list[tuple[str, Any]]:
    return [
        ("first", lambda: Counting(kind, 1)),
        ("middle", lambda: Counting(kind, 2)),
        ("head", lambda: filled(nn.Linear(4, 1), 3)),
    ]
