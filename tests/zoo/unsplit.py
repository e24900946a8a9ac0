"""Modules as their authors wrote them, which nobody has cut: for tests of rpcmp.splitting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rpcmp


class Block(nn.Module):
    """A residual block with dropout, a mask, and a table that all blocks read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, hidden: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        inner: Tensor = self.inner(self.norm(hidden) * table)
        return hidden + inner * mask.unsqueeze(-1)


class Language(nn.Module):
    """A language model: tied embedding and head, a buffer that is not stored, and constants."""

    table: Tensor
    scale: Tensor

    def __init__(self, blocks: int = 3, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        if mask is None:
            mask = torch.ones_like(tokens)
        with torch.no_grad():
            places = torch.arange(tokens.shape[1], device=tokens.device)
            table = self.table * torch.tensor([1.0, -1.0]).repeat(4) + places.sum() / 1e3
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden, mask, table)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.head(self.norm(hidden.float()))
        return {"logits": logits, "aside": None, "states": (hidden,)}


class Adapted(nn.Module):
    """A frozen language model that `init` has, and what is trained before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(8))
        self.base = rpcmp.from_init(Language)
        self.base.requires_grad_(False)
        self.after = nn.Linear(11, 11)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        shift = self.before.mean()
        logits: Tensor = self.base(tokens, mask * (1 + shift))["logits"]
        return {"logits": self.after(logits)}


class Drifting(Adapted):
    """Changes the frozen part of it in each forward."""

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.base.get_parameter("layers.1.inner.0.bias").mul_(0.9)
        return super().forward(tokens, mask)


class TwoByTwo(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(6, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks(self.left(left) + self.right(right))
        return self.first(hidden), self.second(hidden)


class Convolution(nn.Module):
    """A convolution, batch normalization, and an activation in place."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.convolve(x))
        return nn.functional.relu(out, inplace=True)


class Skipping(nn.Module):
    """A U-Net: what goes down is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolution(2, 4), Convolution(4, 8)])
        self.middle = Convolution(8, 8)
        self.up = nn.ModuleList([Convolution(16, 4), Convolution(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            x = block(x)
        out: Tensor = self.out(x)
        return out


class Repeating(nn.Module):
    """The same two blocks, twice: no cut between them leaves each parameter in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for _ in range(2):
            for block in self.blocks:
                x = torch.tanh(block(x))
        out: Tensor = self.end(x)
        return out


class Returning(nn.Module):
    """One block, twice, with a layer between; returns a parameter, and an input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = nn.Linear(4, 4)
        self.end = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.blocks[0](x)
        hidden = self.blocks[0](self.between(hidden) * self.scale)
        return self.end(self.blocks[1](hidden)), self.end.bias, x


class Torn(nn.Module):
    """A block that changes, in place, what another value is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.blocks[0](x) * 1.0
        view = first.view(-1, 2, 2)
        second = self.blocks[1](torch.tanh(first))
        first.mul_(2.0)
        third: Tensor = self.blocks[2](second)
        return third + view.flatten(1)


class Averaging(nn.Module):
    """A moving average, which a new tensor holds after each forward."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return x - self.average


class Branching(nn.Module):
    """A branch on the values of a tensor, which no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return inner if float(x.sum()) > 0 else -inner


class Fixed(nn.Module):
    """A number of samples that is a plain number to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([float(index) for index in range(x.shape[0])])
        out: Tensor = self.inner(x)
        return out * places[:, None]


class Sized(nn.Module):
    """A forward that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] > 6:
            x = x * 2
        if x.shape[1] % 2 == 0:
            x = x + y
        for block in self.blocks:
            x = block(x)
        return x


class HalfFrozen(nn.Module):
    """An encoder without gradients, then half precision; the head is the embedding by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.ModuleList(Block(8) for _ in range(2))
        self.decoder = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        table = torch.ones(8)
        with torch.no_grad():
            for block in self.encoder:
                hidden = block(hidden, mask, table)
            with torch.autocast(hidden.device.type, torch.bfloat16):
                table = table + hidden.mean((0, 1))
        with torch.autocast(hidden.device.type, torch.bfloat16):
            for block in self.decoder:
                hidden = block(hidden, mask, table)
        return nn.functional.linear(hidden.float() + self.embed(tokens), self.embed.weight)


class Losing(nn.Module):
    """No gradients within half precision, which a graph of torch's does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = self.inner(x)
            with torch.no_grad():
                scale: Tensor = self.inner(x)
        return out * scale


class Counting(nn.Module):
    """Blocks that all change one buffer, by a view of it, which no state dict has."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                self.seen[1:] += x.mean(0)[1:]
        return x * self.seen.sum()


class Remembering(nn.Module):
    """Changes a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.last.copy_(out.detach().mean(0))
        return out + self.last


def sentences(count: int = 23, length: int = 8) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return samples for Language and HalfFrozen."""
    torch.manual_seed(1)
    return [sentence(length) for _ in range(count)]


def sentence(length: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    """Return tokens, a mask, and what is to be learnt."""
    tokens, mask = torch.randint(11, (length,)), torch.ones(length)
    mask[length - int(torch.randint(3, (1,))) :] = 0
    return {"tokens": tokens, "mask": mask}, torch.where(mask > 0, tokens, -100)
