"""Small models and data for process tests; shipped to the stage servers beside their configs."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.data import Dataset, TensorDataset

Layers = list[tuple[str, Callable[[], nn.Module]]]
FEATURES = 8


class SlowDataset(TensorDataset):
    """Samples that take their time."""

    def __init__(self, milliseconds: float, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._seconds = milliseconds / 1e3

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(self._seconds)
        return tuple(tensor[index] for tensor in self.tensors)


def slow_regression(milliseconds: float, samples: int = 50) -> SlowDataset:
    return SlowDataset(milliseconds, *regression(samples).tensors)


def regression(samples: int = 50) -> TensorDataset:
    """Inputs (samples, 8) and targets (samples, 1), float32."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


class Unreadable(Dataset[tuple[Tensor, ...]]):
    """`regression` with one unreadable sample.

    Args:
        at: its number; -1: it has been mended.
    """

    def __init__(self, at: int = 37) -> None:
        self._at, self._samples = at, regression()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == self._at:
            raise ValueError(f"sample {index} is no picture")
        found: tuple[Tensor, ...] = self._samples[index]
        return found


def lost(marker: str) -> Unreadable:
    """Return `regression` on a disk that is lost once the data is opened; `marker` records it."""
    if Path(marker).exists():
        raise OSError("the disk is gone")
    Path(marker).touch()
    return Unreadable()


def tokens(samples: int = 40, length: int = 6, vocabulary: int = 11) -> TensorDataset:
    """Inputs and targets (samples, length), int64."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def mlp(blocks: int = 3) -> Layers:
    """Return linear layers with dropout and batch normalization: order and seeds matter."""
    hidden: Layers = [(f"block{index}", lambda: Block(FEATURES)) for index in range(blocks)]
    return [*hidden, ("head", lambda: nn.Linear(FEATURES, 1))]


class Block(nn.Module):
    """A residual block: its input is read twice, so the order of gradient sums shows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(features, 2 * features),
            nn.BatchNorm1d(2 * features),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Linear(2 * features, features),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return x + 0.5 * inner + x.tanh()


class HalfEvaluating(nn.Module):
    """Puts a part of itself into evaluation mode when built, as frozen backbones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).eval()

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x)
        return normal + torch.full_like(x, random.random())  # seeded as well


def half_evaluating() -> Layers:
    """Modes and generators other than torch's own."""
    return [("half", HalfEvaluating), ("head", lambda: nn.Linear(FEATURES, 1))]


def in_place() -> Layers:
    """Return layers that change their input, and transposed outputs: hard cases for boundaries."""
    return [
        ("linear", lambda: nn.Linear(FEATURES, FEATURES)),
        ("relu", lambda: nn.ReLU(inplace=True)),
        ("transposed", Transposed),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


class Transposed(nn.Module):
    """Returns a tensor with unusual strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES) / FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.t()).t()


class Opaque(nn.Module):
    """Returns an object that hides its tensor."""

    def forward(self, x: Tensor) -> Any:
        return type("Holder", (), {"x": x})()


def opaque() -> Layers:
    """Return a stage whose output cannot be sent."""
    return [("opaque", Opaque), ("head", lambda: nn.Linear(FEATURES, 1))]


class InBackward(torch.autograd.Function):
    """See in_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def in_backward(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `x`, whose gradient `change` gets and returns."""
    apply: Callable[..., Tensor] = InBackward.apply
    return apply(x, change)


class Sleeper(nn.Module):
    """Sleeps in forward and backward."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.seconds = milliseconds / 1000

    def forward(self, x: Tensor) -> Tensor:
        return in_backward(self._sleep(x), self._sleep)

    def _sleep(self, passing: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return passing


def lopsided(milliseconds: float = 30.0) -> Layers:
    """Return layers, one of which takes longer than all others together and has no parameters."""
    return [
        ("first", lambda: nn.Linear(FEATURES, 4 * FEATURES)),
        ("second", lambda: nn.Linear(4 * FEATURES, FEATURES)),
        ("sleeper", lambda: Sleeper(milliseconds)),
        ("relu", lambda: nn.ReLU(inplace=True)),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


def trees() -> Layers:
    """Return tuples, dicts, integers, an unused output, and shapes that follow the batch."""
    return [("first", ToDict), ("second", ToTuple), ("third", FromTuple)]


class ToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, FEATURES)
        self.unused = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        order = torch.arange(x.shape[0]).flip(0)
        return {"x": self.used(x), "order": order, "unused": self.unused(x), "note": "hello"}


class ToTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, list[Tensor], None]:
        if value["note"] != "hello":
            raise ValueError("plain values travel too")
        x = self.linear(value["x"])
        return x[value["order"]], [value["order"], x.mean(dim=0, keepdim=True)], None


class FromTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)

    def forward(self, value: tuple[Tensor, list[Tensor], None]) -> Tensor:
        x, (order, mean), _ = value
        return self.linear((x + mean)[order])  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """One branch of a graph; `scale` distinguishes branches."""

    def __init__(self, scale: float = 1.0, inputs: int = 1) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(FEATURES * inputs, FEATURES)
        self.dropout = nn.Dropout(0.1)

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.tanh(self.linear(torch.cat(inputs, dim=1))))
        return hidden * self.scale


class TwoHeads(Encoder):
    """An encoder whose readers select parts of its output."""

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = super().forward(*inputs)
        return {"left": x, "right": x.cos(), "nobody": x.sin()}


class Join(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES * inputs, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.linear(torch.cat(inputs, dim=1))  # type: ignore[no-any-return]


def lstm(vocabulary: int = 11, width: int = 8) -> Layers:
    """Embedding, LSTM, head."""
    return [
        ("embedding", lambda: nn.Embedding(vocabulary, width)),
        ("lstm", lambda: First(nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True))),
        ("head", lambda: nn.Linear(width, vocabulary)),
    ]


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a metric: the mean absolute error."""
    return (outputs - targets).abs().mean()


def report(predict: Callable[[Tensor], Tensor]) -> str:
    """Print a summary after training."""
    return f"the report says {tuple(predict(torch.zeros(7, FEATURES)).shape)}"


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]  # type: ignore[no-any-return]


def transformer(vocabulary: int = 11, width: int = 8) -> Layers:
    """Embedding, two encoder layers, head."""

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)

    return [
        ("embedding", lambda: nn.Embedding(vocabulary, width)),
        ("block0", block),
        ("block1", block),
        ("head", lambda: nn.Linear(width, vocabulary)),
    ]


def cnn() -> Layers:
    """Return convolutions, batch normalization, dropout, and a weight that is used twice."""
    return [
        ("image", lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1))),
        ("norm", lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True))),
        ("narrow", lambda: nn.Sequential(nn.Conv2d(4, 1, 3, padding=1), nn.Flatten())),
        ("tied", Tied),
        ("dropout", lambda: nn.Dropout(0.2)),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).tanh()
        return x + self.second(hidden)  # type: ignore[no-any-return]


def sequence(vocabulary: int = 11, width: int = 8) -> Layers:
    """Return layers that a second forward could break: dropout, in-place, statistics."""
    return [
        *lstm(vocabulary, width)[:2],
        ("relu", lambda: nn.ReLU(inplace=True)),
        transformer(vocabulary, width)[1],
        ("norm", lambda: Channels(nn.BatchNorm1d(width))),
        ("head", lambda: nn.Linear(width, vocabulary)),
    ]


class Channels(nn.Module):
    """A layer for (samples, channels, length), run on (samples, length, channels)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def spiked(samples: int, where: int) -> TensorDataset:
    """Return `regression` with one sample outside of float16's range."""
    inputs, targets = regression(samples).tensors
    inputs[where] = 1e30
    return TensorDataset(inputs, targets)


def infinities() -> TensorDataset:
    """Inputs (12, 8) and targets (12, 1); of the first six are one inf and one -inf."""
    inputs, targets = regression(12).tensors
    targets[0], targets[5] = torch.inf, -torch.inf
    return TensorDataset(inputs, targets)


def product(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a loss with the targets' sign, of any size, and with gradients of the same size."""
    return (outputs.abs() * targets).mean()


# Things that go wrong.


class Impure(nn.Module):
    """Depends on its process: no two runs are equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + os.getpid())


def impure() -> Layers:
    """Return a layer that no reference can reproduce."""
    return [("impure", Impure), ("head", lambda: nn.Linear(FEATURES, 1))]


class Trouble(nn.Module):
    """Passes its input on until it fails.

    Args:
        phase: "forward" or "backward".
        step: in which training step; counted by the forwards that this layer has seen.
        microbatches: micro-batches a step.
        kind: "raise", "nan", "exit" or "segfault".
    """

    def __init__(self, phase: str, step: int, microbatches: int, kind: str = "raise") -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.phase, self.at, self.kind = phase, (step - 1) * microbatches + 1, kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        due = self.calls == self.at
        if due and self.phase == "forward":
            return trouble(self.kind, self.linear(x))
        x = self.linear(x)
        return in_backward(x, functools.partial(trouble, self.kind)) if due else x


def trouble(kind: str, x: Tensor) -> Tensor:
    match kind:
        case "nan":
            return x * float("nan")
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(3)
        case "fork":  # the copy holds the worker's connections, and outlives it
            if os.fork() == 0:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("planted: größer als erlaubt")


def troubled(
    phase: str, position: int = 1, step: int = 1, microbatches: int = 4, kind: str = "raise"
) -> Layers:
    """Return four layers; the one at `position` fails."""

    def layer(index: int) -> Callable[[], nn.Module]:
        if index == position:
            return lambda: Trouble(phase, step, microbatches, kind)
        return lambda: nn.Linear(FEATURES, FEATURES)

    return [*((f"layer{i}", layer(i)) for i in range(3)), ("head", lambda: nn.Linear(FEATURES, 1))]


def mismatched() -> Layers:
    """Return layers, the second of which expects more features than the first returns."""
    return [("narrow", lambda: nn.Linear(FEATURES, 5)), ("wide", lambda: nn.Linear(20, 1))]


def broken_factory() -> nn.Module:
    """A factory that raises."""
    raise ValueError("this factory is broken")


def broken_layers() -> Layers:
    """The second layer's factory raises."""
    return [("good", lambda: nn.Linear(FEATURES, 1)), ("bad", broken_factory)]


class TroubledSGD(torch.optim.SGD):
    """An optimizer that fails in its second step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("planted in the optimizer")
        return super().step(closure)


# Jitter.


class Jitter(nn.Module):
    """A layer that takes a random time in forward and in backward."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.milliseconds = milliseconds

    def forward(self, x: Tensor) -> Tensor:
        return in_backward(self.linear(self._dawdle(x)), self._dawdle)

    def _dawdle(self, passing: Tensor) -> Tensor:
        dawdle(self.milliseconds)
        return passing


class JitterSGD(torch.optim.SGD):
    """An optimizer that takes a random time."""

    def step(self, closure: Any = None) -> Any:
        dawdle(1.0)
        return super().step(closure)


def dawdle(milliseconds: float) -> None:
    """Sleep for up to `milliseconds`, drawn without a seed."""
    time.sleep(random.SystemRandom().random() * milliseconds / 1000)


def jittery(milliseconds: float = 1.0) -> Layers:
    """Return four layers that sleep for random times."""
    hidden: Layers = [(f"layer{i}", lambda: Jitter(milliseconds)) for i in range(4)]
    return [*hidden, ("head", lambda: nn.Linear(FEATURES, 1))]


class CountOpen(nn.Module):
    """Outputs the number of micro-batches of this stage between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    def forward(self, x: Tensor) -> Tensor:
        self.open += 1
        return in_backward(0.0 * x + self.open, self._close)

    def _close(self, gradient: Tensor) -> Tensor:
        self.open -= 1
        return gradient


def counting() -> Layers:
    """Return a model whose loss, with `output_mean`, shows the schedule of its last stage."""
    return [("head", lambda: nn.Linear(FEATURES, 1)), ("count", CountOpen)]


def output_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that equals the model's output."""
    return outputs.mean()


class Leak(nn.Module):
    """Leaks memory in every step."""

    def __init__(self, leak: int) -> None:
        super().__init__()
        self._leak = leak
        self._kept: list[bytes] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self._leak:
            self._kept.append(os.urandom(self._leak // 4))  # one of four micro-batches
        return x


def leaking(leak: int = 0) -> Layers:
    """Return a model that leaks `leak` bytes per step."""
    return [
        ("block", lambda: Block(FEATURES)),
        ("leak", lambda: Leak(leak)),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


def sleepy(member: str, marker: str) -> Layers:
    """Return a layer that sleeps in one member of the first group, see Drowsy."""
    return [("sleeper", lambda: Drowsy(member, marker)), ("head", lambda: nn.Linear(FEATURES, 1))]


class Drowsy(nn.Module):
    """Sleeps in every forward of the one member that creates the marker.

    The marker has that process's number: whatever the process itself kept would be put back after
    an evaluation.
    """

    def __init__(self, member: str, marker: str) -> None:
        super().__init__()
        self.member, self.marker = member, Path(marker)

    def forward(self, x: Tensor) -> Tensor:
        if not self.marker.exists() and rpc.get_worker_info().name == self.member:
            self.marker.write_text(str(os.getpid()))
        if self.marker.exists() and self.marker.read_text() == str(os.getpid()):
            time.sleep(0.1)
        return x


def wide() -> Layers:
    """Two linear layers."""
    return [
        ("hidden", lambda: nn.Linear(FEATURES, FEATURES)),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


_widths = itertools.count(FEATURES)


def wider() -> Layers:
    """Return two layers that are wider each time, as if each host had code of its own."""
    return [
        ("hidden", lambda: nn.Linear(FEATURES, next(_widths))),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]


def language(vocabulary: int = 11, width: int = 8, marker: str = "") -> Layers:
    """Return an embedding and a head that may share a weight, and layers between them.

    Args:
        marker: a file; if it is missing, the worker of the third layer creates it and dies.
    """
    return [
        ("embed", lambda: nn.Embedding(vocabulary, width)),
        ("hidden", lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2))),
        ("mix", lambda: Mortal(width, marker)),
        ("head", lambda: nn.Linear(width, vocabulary, bias=False)),
    ]


class Mortal(nn.Linear):
    """Ends its process in the seventh forward, once."""

    def __init__(self, width: int, marker: str) -> None:
        super().__init__(width, width)
        self._marker = marker
        self._left = 7

    def forward(self, x: Tensor) -> Tensor:
        self._left -= 1
        if not self._left:
            die_once(self._marker)
        return super().forward(x)


def die_once(marker: str) -> None:
    """End the process if there is a marker and its file is missing, which is written before."""
    if marker and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Looking(nn.Embedding):
    """An embedding whose gradient is sparse, without saying so."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight, sparse=True)


def sparse(says_so: bool = False) -> Layers:
    """A layer whose gradient is sparse."""
    return [
        ("embed", lambda: nn.Embedding(11, 8, sparse=True) if says_so else Looking(11, 8)),
        ("head", lambda: nn.Linear(8, 11)),
    ]


class Hungry(nn.Module):
    """Takes memory of its device in a forward, in the third micro-batch that it computes."""

    def __init__(self, gigabytes: int) -> None:
        super().__init__()
        self.gigabytes, self.calls = gigabytes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            x = x + torch.empty(self.gigabytes * 2**28, device=x.device)[:1]
        return x


def hungry(gigabytes: int = 2) -> Layers:
    """Return layers of which the second to last takes more memory than a device may have."""
    first, head = mlp(1)
    return [first, ("hungry", lambda: Hungry(gigabytes)), head]
