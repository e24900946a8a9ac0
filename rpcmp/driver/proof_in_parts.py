"""Prove the parts of a module one by one, where all of it is too large for this host.

    model (too large)                 what lies between its parts: no autograd.Function may be there
    ├── embed (nn.Embedding)          torch's own: nothing to prove
    ├── layers.0                      cut by itself and compared, by `rpcmp.splitting.proof`
    ├── layers.1, layers.2, ...       like layers.0; one by one while there is time
    └── head                          too large, or not to be called alone: its own parts

Each part has inputs of the shapes that it has in the module, with random numbers, and random
weights for as long as it is compared. The gradients of its inputs count as well: reversing them
changes no parameter of the part.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, one_line, some_of
from rpcmp.pipelining import pytree
from rpcmp.splitting.exporting import BY_HAND
from rpcmp.splitting.proof import Guard, prove, require_no_hooks
from rpcmp.splitting.recording import FreeSize, PartCall, Recording, Shape
from rpcmp.splitting.side_by_side import autocast_to
from rpcmp.splitting.side_effects import CHECKPOINT, OWN_FIELDS, SideEffects
from rpcmp.splitting.split import Split, split_module

log = logging.getLogger(__name__)

Fits = Callable[[nn.Module, PartCall], bool]
"""Whether this host has the memory and the time to compare a part in such a call."""


def prove_in_parts(
    module: nn.Module,
    recording: Recording,
    lengths: tuple[int, int],
    fits: Fits,
    autocast: torch.dtype | None,
    seconds: float,
) -> list[str]:
    """Compare the parts of a module with themselves as they are cut.

    Args:
        module: its parameters need no values, and have others afterwards.
        recording: of an export of the module.
        lengths: of its sequences in that, and of those to compare with.
        seconds: after which no part is compared that is like one before; all others always are.

    Returns:
        The parts of user code that could not be compared: too large, or not to be called alone.

    Raises:
        ConfigError: a part differs, or may later, or what lies between them may; and why.
    """
    name = type(module).__name__
    require_no_hooks(module, name)
    guard, end = Guard(name), time.monotonic() + seconds
    nodes = recording.functions.get("", {})
    for forward in recording.forwards:
        guard.check(forward, 0)  # each is a first one: an export sets attributes back
    guard.seen.has_checkpoints = CHECKPOINT in nodes.values()
    if guard.seen.has_checkpoints:
        raise ConfigError(f"{name} cannot be cut as it is{guard.causes()}\n{BY_HAND}")
    calls = {name: with_lengths(each, *lengths) for name, each in recording.calls.items()}
    found = _ComparedParts(module, calls, recording.functions, fits, autocast)
    for first, *alike in found.by_kind():
        proven = {_settings(first[1])}
        for each in alike:
            is_other = bool(recording.functions.get(each[0])) and _settings(each[1]) not in proven
            if is_other or time.monotonic() < end:
                found.prove(*each)
                proven.add(_settings(each[1]))
    if lacking := found.lacks(nodes):
        raise ConfigError(
            f"{name} calls an autograd.Function outside of the parts that can be compared on this "
            f"host, and its own backward is lost in a cut: {some_of(lacking)}; give it a module of "
            f"its own, or {BY_HAND}"
        )
    changed = (name for name, kind in guard.seen.changed.items() if kind == "number")
    counters = [f"{name}, which a forward changes" for name in changed if not found.covers(name)]
    unseen = [f"what lies between the parts ({recording.unseen})"] if recording.unseen else []
    return [*found.uncompared, *counters, *unseen]


@dataclass
class _ComparedParts:
    """The parts of a module, and what was seen in those that were compared."""

    module: nn.Module
    calls: dict[str, PartCall]
    functions: dict[str, dict[Any, str]]
    fits: Fits
    autocast: torch.dtype | None
    seen: SideEffects = field(default_factory=SideEffects)
    uncompared: list[str] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)

    def by_kind(self) -> list[list[tuple[str, nn.Module]]]:
        """Compare one part of each kind, and return all parts that can be, by kind."""
        kinds: dict[Any, list[tuple[str, nn.Module]] | None] = {}
        waiting = [("", self.module)]
        while waiting:
            name, part = waiting.pop(0)
            call = self.calls.get(name)
            if call is not None and self.fits(part, call):
                kind = _kind(part, call)
                if kind not in kinds:
                    kinds[kind] = [] if self.prove(name, part) else None
                if (alike := kinds[kind]) is not None:
                    alike.append((name, part))
                    self.covered.append(f"{name}.")
                    continue
            children = ((f"{name}.{key}".lstrip("."), each) for key, each in part.named_children())
            inner = [child for child in children if self._has_own_code(*child)]
            if call is not None and not inner and (name or not any(part.children())):
                self.uncompared.append(name or type(part).__name__)
            waiting = inner + waiting
        return [alike for alike in kinds.values() if alike is not None]

    def prove(self, name: str, part: nn.Module) -> bool:
        """Compare a part; False: it cannot be cut alone."""
        call = self.calls[name]
        alone = _Alone(part, call, self._samples())
        batches = [alone.draw(positive) for positive in (False, True)]
        before = {parameter: parameter.data for parameter in part.parameters()}
        words = f"{type(self.module).__name__}: {name!r} ({type(part).__name__})"
        try:
            give_values(part, torch.Generator().manual_seed(0))
            if (split := self._split(alone, batches)) is None:
                return False
            self.seen.add(prove(alone, split, batches, self.autocast, False, words))
        except (RuntimeError, ValueError, TypeError) as error:
            log.debug("%s cannot be compared: %s", words, one_line(error))
            return False  # not with these inputs or gradients
        finally:
            for parameter, data in before.items():
                parameter.data, parameter.grad = data, None
        return True

    def _split(self, alone: _Alone, batches: Sequence[tuple[Tensor, ...]]) -> Split | None:
        """Return a part's own cut; None if it cannot be cut alone: it may need a cache, say."""
        try:
            for batch, training in itertools.product(batches, (False, True)):
                alone.train(training)
                with torch.no_grad(), autocast_to(self.autocast):
                    alone(*batch)
            return split_module(alone, batches[0], autocast=self.autocast)
        except Exception as error:  # of the user's code, or of an export
            log.debug("%s cannot be called alone: %s", type(alone.part).__name__, one_line(error))
            return None

    def _samples(self) -> int:
        """Return the number of samples that the whole module was called with."""
        return shapes(self.calls[""])[0].sizes[0]

    def covers(self, attribute: str) -> bool:
        """Whether an attribute or a global is one that a part changes which was compared."""
        return attribute.startswith(tuple(self.covered)) or attribute in self.seen.changed

    def lacks(self, nodes: dict[Any, str]) -> list[str]:
        """Return the Functions of a whole forward that are in no part that was compared."""
        own = (self.functions.get(name.removesuffix("."), {}) for name in self.covered)
        inside = set().union(*own)
        return [*dict.fromkeys(name for node, name in nodes.items() if node not in inside)]

    def _has_own_code(self, name: str, part: nn.Module) -> bool:
        """Whether a part's code is not all torch's own."""
        return bool(self.functions.get(name)) or any(
            not type(each).__module__.startswith("torch.nn.") or "forward" in vars(each)
            for each in part.modules()
        )


def give_values(module: nn.Module, generator: torch.Generator) -> None:
    """Give parameters values of their own to compute with, in new memory."""
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter.data)
        if parameter.is_floating_point():
            # A scale may have to be positive.
            least, most = (0.1, 0.3) if parameter.dim() < 2 else (-0.1, 0.1)
            drawn = torch.empty(parameter.shape).uniform_(least, most, generator=generator)
            parameter.data.copy_(drawn)


class _Alone(nn.Module):
    """A part that is called with tensors alone; what else it is called with stays as it was.

    Tensors without a dimension of samples are its own. To all numbers that come in, one is added
    that is zero, and whose gradient is that of the input.
    """

    def __init__(self, part: nn.Module, call: PartCall, samples: int) -> None:
        super().__init__()
        self.part, self._call = part, call
        self._given = given = shapes(call)
        sizes = [each.sizes[0] if each.sizes else 0 for each in given]
        rows = samples if samples in sizes else max(sizes, default=0)  # of tokens, perhaps
        self._is_input = [size == rows > 1 for size in sizes]
        generator = torch.Generator().manual_seed(0)
        for number, (each, is_input) in enumerate(zip(given, self._is_input, strict=True)):
            if is_input and each.dtype.is_floating_point:
                zeros = torch.zeros(each.sizes[1:], dtype=each.dtype)
                self.register_parameter(f"input_{number}", nn.Parameter(zeros))
            elif not is_input:
                own = _drawn(each, False, generator)
                if own.is_floating_point():
                    self.register_parameter(f"input_{number}", nn.Parameter(own))
                else:
                    self.register_buffer(f"input_{number}", own)

    def draw(self, positive: bool) -> tuple[Tensor, ...]:
        """Return inputs of their shapes."""
        generator = torch.Generator().manual_seed(1)
        pairs = zip(self._given, self._is_input, strict=True)
        return tuple(_drawn(each, positive, generator) for each, is_input in pairs if is_input)

    def forward(self, *inputs: Tensor) -> Any:
        left, values = iter(inputs), []
        for number, is_input in enumerate(self._is_input):
            own = getattr(self, f"input_{number}", None)
            value = next(left) if is_input else own
            values.append(value + own if is_input and own is not None else value)
        following = iter(values)

        def value_of(leaf: Any) -> Any:
            return next(following) if isinstance(leaf, Shape) else leaf

        args, kwargs = pytree.map_leaves(value_of, (self._call.args, self._call.kwargs))
        return self.part(*args, **kwargs)


def _drawn(shape: Shape, positive: bool, generator: torch.Generator) -> Tensor:
    """Return a tensor of random numbers: whole ones are 0 and 1, which every table has."""
    if not shape.dtype.is_floating_point and not shape.dtype.is_complex:
        return torch.randint(0, 2, shape.sizes, generator=generator).to(shape.dtype)
    dtype = torch.promote_types(shape.dtype, torch.float32)
    drawn = torch.randn(shape.sizes, dtype=dtype, generator=generator)
    return (drawn.abs() + 0.1 if positive else drawn).to(shape.dtype)


def shapes(call: PartCall) -> list[Shape]:
    """Return the shapes of all tensors of a call."""
    leaves = pytree.leaves((call.args, call.kwargs))
    return [each for each in leaves if isinstance(each, Shape)]


def with_lengths(call: PartCall, before: int, now: int) -> PartCall:
    """Return a call with sequences of another length, wherever the module leaves it free."""

    def size(value: int) -> int:  # of all tokens of several samples as well
        return value // before * now if value % before == 0 else value

    def resized(leaf: Any) -> Any:
        match leaf:
            case Shape(dtype, sizes, is_free):
                new = (size(n) if free else n for n, free in zip(sizes, is_free, strict=True))
                return Shape(dtype, tuple(new), is_free)
            case FreeSize(value):
                return size(value)
        return leaf

    return PartCall(*pytree.map_leaves(resized, (call.args, call.kwargs)))


def _kind(part: nn.Module, call: PartCall) -> Any:
    """Return what parts have in common that differ in their numbers only."""
    classes = tuple((name, type(each)) for name, each in part.named_modules())
    tensors = tuple(
        (name, each.dtype, each.shape, each.requires_grad)
        for name, each in itertools.chain(part.named_parameters(), part.named_buffers())
    )
    return classes, tensors, repr(call)


def _settings(part: nn.Module) -> str:
    """Return the plain attributes of a part, such as its number or a scale."""
    plain = (bool, int, float, str, tuple, type(None))
    return repr(
        [
            (name, key, value)
            for name, each in part.named_modules()
            for key, value in sorted(vars(each).items())
            if isinstance(value, plain) and key not in OWN_FIELDS
        ]
    )
