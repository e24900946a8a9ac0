"""Models, losses and data that other libraries train as something else without a word; float64."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def filled(module: nn.Module, seed: int = 1) -> nn.Module:
    """Give a module double parameters of its own generator."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    for each in module.parameters():
        drawn = torch.randn(each.shape, generator=generator, dtype=torch.float64)
        each.data.copy_(drawn * 0.5)
    return module


def pairs(samples: int = 32) -> Dataset[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


def classes(samples: int = 32) -> Dataset[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Scaled(Function):
    """A tenth of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.1


class Clipped(Function):
    """A gradient that may not be too large, which few are at first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-50, 50)


class Pulling(Function):
    """Adds the gradient of a small loss of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        pulled: Tensor = gradient + 1e-9 * x
        return pulled


class Swish(Function):
    """x * sigmoid(x) that keeps no sigmoid: a derivative like any other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        swished: Tensor = x * x.sigmoid()
        return swished

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        derived: Tensor = gradient * (sigmoid * (1 + x * (1 - sigmoid)))
        return derived


CALLS = [0]
"""How often a forward has run, for all the process to see."""


def halved(module: nn.Module, given: Any, got: Any) -> Any:
    return tuple(gradient * 0.5 for gradient in given)


class Block(nn.Module):
    """One of four; `kind` says what the second does besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kind = kind
        self.calls = 0
        self.noise = np.random.default_rng(3)
        if kind == "hook of a module":
            self.register_full_backward_hook(halved)
        if kind == "hook after sums":
            self.inner.weight.register_post_accumulate_grad_hook(_halve)
        if kind == "hook of a parameter":
            self.inner.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in FUNCTIONS:
            x = FUNCTIONS[self.kind].apply(x)
        if self.kind == "hook of a tensor" and x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))
        if self.kind == "random" and random.random() < 0.5:
            return x
        if self.kind == "numpy" and np.random.rand() < 0.5:
            return x
        if self.kind == "generator" and self.noise.random() < 0.5:
            return x
        if self.kind == "counter":
            self.calls += 1
            x = x * min(1.0, self.calls / 1000)
        if self.kind == "late counter":
            self.calls += 1
            x = x if self.calls < 100 else x * 0.5
        if self.kind == "global counter":
            CALLS[0] += 1
            x = x if CALLS[0] < 100 else x * 0.5
        if self.kind == "cache" and not self.calls:
            self.calls = 1  # as a table that is computed once
        if self.kind == "reentrant":
            result: Tensor = checkpoint(self._step, x, use_reentrant=True)
            return result
        return self._step(x)

    def _step(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x).tanh()
        return result


FUNCTIONS = {"scaled": Scaled, "clipped": Clipped, "pulling": Pulling, "swish": Swish}


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Record(dict[str, Any]):
    """A dict whose values are attributes too, like outputs of transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Named(NamedTuple):
    y: Tensor
    scale: float


class ModelOutput(OrderedDict[str, Any]):
    """As transformers have them: a field without a value is no item, and an attribute."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    y: Tensor | None = None
    scale: float | None = None


def by_attributes(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that asks for what a module may have returned by attributes."""
    error: Tensor = getattr(outputs, "scale", 1.0) * (outputs.y - targets).square().mean()
    return error / getattr(outputs, "temperature", 2.0)


def by_positions(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that reads a ModelOutput in all ways that there are."""
    assert outputs.loss is None
    assert getattr(outputs, "loss", 1.0) is None
    assert "loss" not in outputs
    assert outputs[0] is outputs.to_tuple()[0] is outputs["y"]
    return by_attributes(outputs, targets)


class Net(nn.Module):
    """A module that is cut; `returns` says in which form it gives what it computes."""

    def __init__(self, kind: str = "", returns: str = "") -> None:
        super().__init__()
        self.kind, self.returns = kind, returns
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind if n == 1 else "") for n in range(4))
        self.head = nn.Linear(8, 1)
        filled(self)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if self.kind == "mixing":
            x = x - x.mean(0)
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        if self.returns == "dict":
            return {"y": y, "scale": 2.5, "power": 2 if self.training else 1}
        if self.returns == "list":
            return [y, "square"]
        if self.returns == "record":
            return Record(y=y, scale=2.5)
        if self.returns == "model output":
            return Output(y=y, scale=2.5)
        if self.returns == "named tuple":
            return Named(y, 2.5)
        return y


def by_form(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that reads the numbers and the form of what the module returns."""
    if isinstance(outputs, dict):
        error = (outputs["y"] - targets).abs() ** outputs.get("power", 1)
        scaled: Tensor = outputs.get("scale", 1.0) * error.mean()
        return scaled
    is_square = isinstance(outputs, list) and outputs[1] == "square"
    found: Tensor = ((outputs[0] - targets) ** (2 if is_square else 1)).mean()
    return found


class Prototypes(nn.Module):
    """A loss that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 8))
        filled(self, 2)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs @ self.weight.T, targets)


class Holder:
    """A loss with a module that nobody sees."""

    def __init__(self) -> None:
        self.inner = Prototypes()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(outputs, targets)
        return loss


CARRIED = ["attribute", "new", "list", "buffer", "unstored buffer", "generator", "object"]


class Inside:
    def __init__(self) -> None:
        self.calls = 0


class Carrying(nn.Module):
    """Adds what it kept of the mini-batch before, in an attribute or a buffer."""

    kept: Tensor
    aside: Tensor
    first: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.kind = kind
        self.before: Any = None if kind == "attribute" else [torch.zeros(8, dtype=torch.float64)]
        self.noise, self.inside = np.random.default_rng(3), Inside()
        self.register_buffer("kept", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("aside", torch.zeros(8, dtype=torch.float64), persistent=False)
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        new = y.detach().mean(0)
        if self.kind == "attribute":
            y = y if self.before is None else y + self.before
            self.before = new
        elif self.kind == "new":
            if not hasattr(self, "first"):
                self.first = new
            y = y - self.first
        elif self.kind == "list":
            y = y + self.before[-1]
            self.before.append(new)
        elif self.kind == "generator":
            y = y * (1 + self.noise.random())
        elif self.kind == "object":
            self.inside.calls += 1
            y = y / self.inside.calls
        elif self.kind == "buffer":
            y = y + self.kept
            self.kept.copy_(new)
        elif self.kind == "unstored buffer":
            y = y + self.aside
            self.aside = new
        return y


def carrying(kind: str) -> list[tuple[str, Any]]:
    return [
        ("first", lambda: Carrying(kind)),
        ("middle", lambda: filled(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 2)),
        ("head", lambda: filled(nn.Linear(8, 1), 3)),
    ]


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 1


class Averaged(nn.Module):
    """Follows its own weight by an average, in a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.teacher = nn.Linear(4, 8), nn.Linear(4, 8)
        filled(self)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.lerp_(self.inner.weight.data, 0.5)
        result: Tensor = self.inner(x) + self.teacher(x)
        return result


def averaged() -> list[tuple[str, Any]]:
    return [("first", Averaged), ("head", lambda: filled(nn.Linear(8, 1), 3))]


class Freezing(nn.Module):
    """Freezes a layer of its own in its second forward; "thaws": trains one from then on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.calls, self.thaws = filled(nn.Linear(4, 8)), 0, kind == "thaws"
        self.inner.requires_grad_(not self.thaws)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2:
            self.inner.requires_grad_(self.thaws)
        result: Tensor = self.inner(x)
        return result


def freezing(kind: str) -> list[tuple[str, Any]]:
    return [("first", lambda: Freezing(kind)), ("head", lambda: filled(nn.Linear(8, 1), 3))]


class WritingToItself(nn.Module):
    """Writes to its buffer, or in its second call to its weight, or makes a parameter for once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner: nn.Module = filled(nn.Linear(4, 8))
        self.calls, self.kind = 0, kind
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.kind == "rounds later" and self.calls == 2:
            weight: Any = self.inner.weight
            weight.data.mul_(10).round_().div_(10)
        y: Tensor = self.inner(x)
        if self.kind == "running scale":
            self.scale.mul_(0.9).add_(0.1 * y.detach().abs().mean(0))
            return y * self.scale
        return y * nn.Parameter(torch.full_like(self.scale, 2.0)) if self.kind == "temporary" else y


def writing(kind: str) -> list[tuple[str, Any]]:
    return [("first", lambda: WritingToItself(kind)), ("head", lambda: filled(nn.Linear(8, 1), 3))]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def doubly_complex() -> list[tuple[str, Any]]:
    return [("first", Complex), ("head", lambda: filled(nn.Linear(8, 1), 3))]


def detached() -> list[tuple[str, Any]]:
    return [
        ("first", lambda: filled(nn.Linear(4, 8))),
        ("head", lambda: filled(nn.Linear(8, 1), 3)),
        ("cut", Detached),
    ]


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """In-batch negatives."""
    normed = nn.functional.normalize(outputs, dim=1)
    return nn.functional.cross_entropy(normed @ normed.T / 0.1, torch.arange(len(outputs)))


def normed(outputs: Tensor, targets: Tensor) -> Tensor:
    """One, whatever comes; its gradient depends on all samples."""
    error = (outputs - targets).square().mean()
    return error / error.detach().clone()


def ratio(outputs: Tensor, targets: Tensor) -> Tensor:
    """A ratio of sums, as Dice."""
    return (outputs - targets).square().sum() / (1 + targets.abs().sum())


def embeddings() -> list[tuple[str, Any]]:
    return [
        ("first", lambda: filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))),
        ("head", lambda: filled(nn.Linear(8, 8), 3)),
    ]


def towers() -> list[tuple[str, Any]]:
    return [
        ("first", lambda: filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))),
        ("head", lambda: filled(nn.Linear(8, 1), 3)),
    ]


TIME, WIDTH = 8, 4
"""As many samples as a mini-batch has are as long: no size tells one from the other."""


class Sequences(Dataset[Any]):
    """Each sample is one time, so that a mini-batch is a sequence, to layers that read it so."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(TIME, WIDTH, generator=generator, dtype=torch.float64)
        return x, x[:, :1].cumsum(0)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        samples = Sequences()
        return (samples[index] for index in range(len(samples)))


def stacked(samples: Any) -> Any:
    """Return (time, samples, width), as torch's LSTM takes it if nobody says otherwise."""
    return tuple(torch.stack(column, 1) for column in zip(*samples, strict=True))


def token_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, 8)
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)[0]
        return result


def time_first() -> list[tuple[str, Any]]:
    return [("first", Recurrent), ("head", lambda: filled(nn.Linear(8, 1), 3))]


class Centers(nn.Module):
    """A loss with running centers of its classes."""

    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(3, 8, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        apart = outputs - self.centers[targets]
        with torch.no_grad():
            self.centers.index_add_(0, targets, 0.1 * apart)
        return apart.square().mean()


class Wrapping:
    """A scheduler around another one, as many libraries have them."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(self) -> None:
        pass

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def half_detached() -> list[tuple[str, Any]]:
    return [
        ("first", lambda: filled(nn.Linear(4, 8))),
        ("cut", Detached),
        ("head", lambda: filled(nn.Linear(8, 1), 3)),
    ]


def wrapped(kind: str) -> nn.Module:
    """A module as some factories return it."""
    net = Net()
    if kind == "compiled block":
        net.blocks[1] = torch.compile(net.blocks[1])  # type: ignore[assignment]
        return net
    around: dict[str, Any] = {
        "compiled": torch.compile,
        "parallel": nn.DataParallel,
        "averaged": torch.optim.swa_utils.AveragedModel,
        "scripted": lambda module: torch.jit.trace(module, torch.ones(2, 4).double()),
    }
    made: nn.Module = around[kind](net)
    return made


def wrapped_layers(kind: str) -> list[tuple[str, Any]]:
    return [("first", lambda: wrapped(kind)), ("last", nn.Identity)]


class Direct(nn.Module):
    """Reads the inputs again, and adds how steep it is in them."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.inner = nn.Linear(12, 1)
        filled(self, 5)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        x.requires_grad_(self.asks)
        with torch.enable_grad():
            y: Tensor = self.inner(torch.cat([hidden, x], 1))
            if self.asks:
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                y = y + slope.square().sum(1, keepdim=True)
        return y


def hidden() -> nn.Module:
    return filled(nn.Linear(4, 8))


class Injecting(Function):
    """An auxiliary loss beside the model's own, as libraries for mixtures of experts have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


class Auxiliary(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        sizes = y.square().sum(1)
        loss = sizes.mean() if self.kind == "mean" else sizes.sum() / 8
        found: Tensor = Scaled.apply(y) if self.kind == "scaled" else Injecting.apply(y, loss)
        return found


def injecting(kind: str) -> list[tuple[str, Any]]:
    """Layers with an auxiliary loss of a "mean" or a "sum" over samples; or "scaled" gradients."""
    return [
        ("a", lambda: filled(Auxiliary(kind), 1)),
        ("b", lambda: filled(nn.Linear(4, 1), 2)),
    ]


class OnceAStep(nn.Module):
    """What is done once per mini-batch, in training: by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer: Any = filled(nn.Linear(4, 4), 3)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))
        self.calls = 0
        if kind == "clip":
            self.layer.get_parameter("weight").register_hook(
                lambda gradient: gradient.clamp(-0.1, 0.1)
            )
        if kind == "norm":
            with torch.random.fork_rng():
                torch.manual_seed(0)  # it begins with vectors that it draws
                self.layer = spectral_norm(self.layer)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "mean" and self.training:
            y = y - y.mean(0)
        if self.kind == "center" and self.training:
            self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            y = y - self.center
        if self.kind == "anneal":
            self.calls += self.training
            y = y / (1 + 0.1 * self.calls)
        if self.kind == "rescale":
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return y


class Unsplit(nn.Sequential):
    """The layers of `once_a_step` as one module."""

    def __init__(self, kind: str) -> None:
        super().__init__(OrderedDict((name, make()) for name, make in once_a_step(kind)))


def once_a_step(kind: str) -> list[tuple[str, Any]]:
    return [
        ("first", lambda: OnceAStep(kind)),
        ("second", lambda: filled(nn.Sequential(nn.Tanh(), nn.Linear(4, 1)), 4)),
    ]


class GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their norm."""

    def step(self, closure: Any = None) -> Any:
        gradients = [each.grad for group in self.param_groups for each in group["params"]]
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        for each in gradients:
            each.div_(norm)
        return super().step(closure)
