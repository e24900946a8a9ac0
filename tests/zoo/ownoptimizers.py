"""Users' optimizers, each unusual in one way."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UP = 25
"""Steps after which some do something else; a trial has fewer."""


class MyOpt(torch.optim.Optimizer):
    """A tutorial's optimizer: two defaults, momentum in the state."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        """Update one parameter."""
        state["m"] = group["decay"] * state.get("m", torch.zeros_like(p)) + grad
        p -= group["lr"] * state["m"]


class Nested(MyOpt):
    """State of dicts in lists in tuples, None, numbers and strings; floats of another dtype."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        count = state.get("count", 0)
        old = state["tree"]["all"][0][1] if count else torch.zeros_like(p, dtype=torch.float64)
        assert old.dtype is torch.float64
        new = group["decay"] * old + grad.double() / 3
        state.update(count=count + 1, nothing=None, mode="plain" if count % 2 else "odd")
        state["tree"] = {"all": [(count, new)], 7: {"x": torch.tensor([count], dtype=torch.int8)}}
        assert state["mode"] in ("plain", "odd")
        p -= (group["lr"] * new * (1 + count % 3)).to(p.dtype)


class Late(MyOpt):
    """State that appears after some steps, with other shapes."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] > 3:
            state["rows"] = state.get("rows", 0) + grad.reshape(grad.shape[0], -1).sum(1)
            p -= group["lr"] * state["rows"].mean()
        p -= group["lr"] * grad


class Counting(MyOpt):
    """State in attributes: a number, and tensors in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.calls = 0
        self.sums: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        self.sums = [*self.sums[-2:], torch.stack(norms).sum()]
        super().step()

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        p -= group["lr"] * grad * self.sums[0] / self.calls


class Noisy(MyOpt):
    """Draws random numbers."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        p -= group["lr"] * (grad + torch.randn_like(grad))


class Beside(MyOpt):
    """Keeps one step counter for all parameters in `state`, as some have done since torch 0.4."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        beside: dict[Any, Any] = self.state
        beside["global"] = {"n": beside.get("global", {"n": 0})["n"] + 1}
        p -= group["lr"] * grad / beside["global"]["n"]


class Around:
    """An optimizer that wraps another one: slow weights, every third step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.inner = MyOpt(params, lr)
        self.param_groups = self.inner.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        self.n = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update all."""
        self.inner.step()
        self.n += 1
        if self.n % 3 == 0:
            parameters = [p for g in self.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, parameters, strict=True):
                slow += (p - slow) / 2
                p.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped state and the slow weights."""
        return {**self.inner.state_dict(), "slow": self.slow, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both."""
        self.slow, self.n = [slow.clone() for slow in state["slow"]], state["n"]
        self.inner.load_state_dict({k: state[k] for k in ("state", "param_groups")})
        self.param_groups = self.inner.param_groups


class NoRate(MyOpt):
    """Has another name for its learning rate."""

    def __init__(self, params: Any, speed: float = 0.1) -> None:
        torch.optim.Optimizer.__init__(self, params, {"speed": speed})

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        p -= group["speed"] * grad


class NoneRate(MyOpt):
    """Its learning rate is None: it determines one by itself."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        p -= grad / (1 + grad.norm())


class Columns(MyOpt):
    """Keeps a matrix in column-major order, as LAPACK returns it: products have other bits."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        rows = grad.reshape(grad.shape[0], -1)
        if not state:
            basis = torch.linalg.qr(torch.randn(rows.shape[1], rows.shape[1]))[0]
            state["bases"] = [basis.t().contiguous().t()]
        (basis,) = state["bases"]
        assert basis.shape[0] == 1 or not basis.is_contiguous()
        p -= group["lr"] * ((rows @ basis) @ basis.t()).reshape(p.shape)


class TwoKeys(MyOpt):
    """Keeps one tensor under two keys."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if not state:
            state["m"] = state["momentum"] = torch.zeros_like(p)
        state["m"] += grad
        p -= group["lr"] * state["momentum"]


class Picky(MyOpt):
    """Accepts only parameters of these sizes."""

    def __init__(self, params: Any, sizes: list[int]) -> None:
        super().__init__(params)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.numel() not in sizes:
                raise ValueError(f"{p.numel()} elements")


RESTORED = (
    MyOpt,
    Nested,
    Late,
    Counting,
    Noisy,
    Beside,
    Around,
    NoRate,
    NoneRate,
    Columns,
    TwoKeys,
)
"""Optimizers that are restored exactly."""


class Pair(NamedTuple):
    """A state that is a plain tuple in a file."""

    m: Any
    n: int


class Named(MyOpt):
    """Named tuples."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        pair = state.get("pair", Pair(torch.zeros_like(p), 0))
        state["pair"] = Pair(pair.m + grad, pair.n + 1)
        p -= group["lr"] * state["pair"].m


class Window(MyOpt):
    """State that is neither a tensor nor a plain value."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        state.setdefault("last", deque(maxlen=3)).append(grad.clone())
        p -= group["lr"] * sum(state["last"])


class LateWindow(MyOpt):
    """`Window`, after a warm-up longer than any trial."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] > WARM_UP:
            state.setdefault("last", deque(maxlen=3)).append(grad.clone())
        p -= group["lr"] * grad


class OwnDice(MyOpt):
    """Keeps its own generator, which state_dict omits."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.dice = torch.Generator().manual_seed(1)

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        p -= group["lr"] * torch.randn(p.shape, generator=self.dice)


class ByParameter(MyOpt):
    """Keeps its own dict by parameter, which state_dict omits."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.sums: dict[Tensor, Tensor] = {}

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        self.sums[p] = self.sums.get(p, torch.zeros_like(p)) + grad
        p -= group["lr"] * self.sums[p]


class Hiding(MyOpt):
    """Its state_dict forgets the state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class Headless(Around):
    """Wraps another optimizer, and saves its state under a different name."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.inner.state_dict(), "slow": self.slow}


class Formless:
    """No parameter groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.params, self.lr = params, lr

    def step(self) -> None:
        """Update all."""
        for p in self.params:
            p.data -= self.lr * p.grad


class Closing(MyOpt):
    """Computes the loss again in its step."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Afraid(ByParameter):
    """Raises if gradients are not as small as usual, and hides its state."""

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if grad.abs().max() > 1e-3:
            raise RuntimeError("gradients explode")
        super().one(p, grad, state, group)


class Helper:
    """State outside of the optimizer, which its `state_dict` does not have."""

    def __init__(self) -> None:
        self.sums: dict[Any, Any] = {}


class LaterHidden(MyOpt):
    """Keeps momentum that is not saved, after a warm-up longer than any trial."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.helper = Helper()
        self.device = torch.device("cpu")
        self.watched = [p for group in self.param_groups for p in group["params"]]
        self.lock = threading.Lock()
        self.numbers = {p: number for number, p in enumerate(self.watched)}
        self.table = {None, *range(2**18)}  # no file holds a set

    def one(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] > WARM_UP:
            grad = self.helper.sums.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(grad)
        p -= group["lr"] * grad


REFUSED = {
    Named: "cannot|no attribute",
    Window: "deque is neither a tensor nor a plain value",
    OwnDice: "no checkpoint holds its attributes dice",
    ByParameter: "no checkpoint holds its attributes sums",
    Hiding: "differ",
    Formless: "no usual form",
    Headless: "has 'base', 'slow': it needs 'state' and 'param_groups' as torch",
    Closing: "needs a closure",
    Afraid: "gradients explode.*recovery.enabled = false",
}
"""Optimizers that cannot be restored, by the error message."""
