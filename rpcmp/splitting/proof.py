"""Prove that the layers of a cut compute what the module does, before they train in its place.

    the module itself     ──> outputs, changed buffers, gradients of all parameters ──┐
    its layers in a row   ──> the same ───────────────────────────────────────────────┴─> equal?

Twice in a row, in training and in evaluation, on different samples and with gradients of different
sizes. What no sample shows is asked of `rpcmp.splitting.side_effects`: a hook that may clip, a
counter that may end a warm-up. Both draw from torch's generators in the same order, so dropout is
compared as well.

Most often all is equal to the last bit. The gradients of a parameter that several layers have may
be added in another order, which is why rounding is let pass.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, one_line, some_of
from rpcmp.splitting.exporting import BY_HAND, Structure, flatten
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.side_effects import SideEffects, backward_hooks, observed
from rpcmp.splitting.split import Split
from rpcmp.splitting.weights import tensors_of

ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5}
"""How far two results may be apart, in parts of the largest number; LOW_ROUNDING of others."""

LOW_ROUNDING = 0.02

IN_ALL = 0.01
"""What is so much less than the largest of all results, in units of their rounding, is none."""

BY_PARTS = (
    'set num_microbatches = 1, or loss_scope = "micro-batch" if a micro-batch is what is meant'
)
"""What is left where results depend on how a mini-batch is cut."""

SCALES = (1.0, 1000.0, 0.0)
"""Sizes of the outputs' gradients: a true derivative grows with them, and is zero with zero."""


def prove(
    module: nn.Module,
    split: Split,
    batches: Sequence[Any],
    autocast: torch.dtype | None = None,
    seconds: float = 60.0,
    in_microbatches: bool = True,
) -> None:
    """Check the layers of a cut against the module, and micro-batches against a mini-batch.

    Args:
        module: with values of its parameters; its buffers and attributes change.
        batches: what it is called with, two of them or more, a few samples each.
        seconds: after which no further comparison begins; there is always one.
        in_microbatches: whether a mini-batch has several, and they ought to be as good as one.

    Raises:
        ConfigError: they differ, or may later, and why.
    """
    with _as_exported():
        _prove(module, split, batches, autocast, seconds, in_microbatches)


@contextlib.contextmanager
def _as_exported() -> Iterator[None]:
    """Let torch's transformer layers compute in evaluation what they do in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which leaves padding at zero
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _prove(
    module: nn.Module,
    split: Split,
    batches: Sequence[Any],
    autocast: torch.dtype | None,
    seconds: float,
    in_microbatches: bool,
) -> None:
    proof = _Proof(module, split, autocast)
    if hooks := backward_hooks(module):
        listed = some_of(hooks)
        raise proof.error(f"has hooks of gradients, which its layers lose: {listed}\n{BY_HAND}")
    end = time.monotonic() + seconds
    for training in (True, False):
        for turn, scale in enumerate(SCALES if training else SCALES[:2]):
            is_first = training and not turn
            # Only what is no derivative may give gradients of none.
            if is_first or (time.monotonic() < end and (scale or proof.has_own_gradients)):
                proof.compare(batches[turn % len(batches)], training, turn, scale)
    if in_microbatches and time.monotonic() < end:
        proof.compare_parts(batches)


class _Proof:
    """Calls a module and its layers in turn, and compares."""

    def __init__(self, module: nn.Module, split: Split, autocast: torch.dtype | None) -> None:
        self._module, self._autocast = module, autocast
        text = split.model_dump_json(include={"layers"})
        self._is_low = autocast is not None or "float16" in text or '"autocast"' in text
        self._tensors = tensors_of(module)
        count = len(split.layers)
        self._layers = [SplitLayer(split, index, self._tensors) for index in range(count)]
        held = {name: each for layer in self._layers for name, each in tensors_of(layer).items()}
        self._copies = {
            id(self._tensors[first]): [held[name] for name in names] for first, *names in split.tied
        }
        self._seen = SideEffects()
        self._changed_before: set[str] = set()

    @property
    def has_own_gradients(self) -> bool:
        return bool(self._seen.functions) or self._seen.has_checkpoints

    def compare(self, batch: Any, training: bool, turn: int, scale: float) -> None:
        """Call both with a mini-batch; raises ConfigError if they differ.

        Args:
            turn: how often both were called in this mode before.
            scale: size of the outputs' gradients.
        """
        for part in (self._module, *self._layers):
            part.train(training)
        before = self._values()
        with observed(self._module) as seen:
            expected = self._results(self._call_module, batch, scale, turn)
        self._require_plain(seen, turn)
        expected |= self._new_values()
        self._give(before)
        found = self._results(self._call_layers, batch, scale, turn) | self._new_values()
        if difference := self._first_difference(found, expected, self._rounding):
            mode = "training" if training else "evaluation"
            raise self.error(
                f"computes something else in layers than as it is: in {mode}, {difference}"
                f"{self._causes()}\n{BY_HAND}"
            )

    def compare_parts(self, batches: Sequence[Any]) -> None:
        """Check, in evaluation, that micro-batches are as good as the mini-batch of them.

        Neither outputs nor sums of gradients may depend on which samples are computed together.
        Batch normalization and dropout are off, but for one without statistics of its own.
        """
        for part in (self._module, *self._layers):
            part.eval()
        if any(layer.needs_two_samples for layer in self._layers):
            return
        before, sizes = self._values(), [_rows(batch) for batch in batches]
        _, whole = self._called(self._call_module, _joined(batches), True, 0)
        if self._draws(batches[0]):
            return  # also in evaluation, and for other samples other numbers
        of_samples = [isinstance(e, Tensor) and _rows(e) == sum(sizes) for e in whole]
        gradients = [
            drawn if is_one else None
            for drawn, is_one in zip(_drawn(whole, 1.0), of_samples, strict=True)
        ]
        _backward(whole, gradients)
        expected = dict(self._gradients())
        self._give(before)
        parts, rows = [], [0, *itertools.accumulate(sizes)]
        for batch, start, end in zip(batches, rows, rows[1:], strict=False):
            parts.append(self._called(self._call_module, batch, True, 0)[1])
            own = [each if each is None else each[start:end] for each in gradients]
            for one, gradient in zip(parts[-1], own, strict=True):
                if gradient is not None and one.shape != gradient.shape:
                    raise self.error(
                        f"returns {list(gradient.shape)} of some samples of a mini-batch, and "
                        f"{list(one.shape)} if they are a micro-batch: {BY_PARTS}"
                    )
            _backward(parts[-1], own)
        self._give(before)
        found = dict(self._gradients())
        for number, (each, *pieces) in enumerate(zip(whole, *parts, strict=True)):
            if of_samples[number]:
                joined = torch.cat([piece.detach() for piece in pieces])
                if _some_rows_differ(joined, each.detach(), self._loosely):
                    return  # by rounding, where a decision hangs on it
                expected[f"output {number}"], found[f"output {number}"] = each.detach(), joined
        if difference := self._first_difference(found, expected, self._loosely):
            raise self.error(
                "computes something else for samples in two micro-batches than for all of them "
                f"together: {difference}; {BY_PARTS}"
            )

    def _draws(self, batch: Any) -> bool:
        """Whether a call, in the present mode, draws random numbers."""
        torch.manual_seed(0)
        before = torch.get_rng_state()
        self._called(self._call_module, batch, False, 0)
        return not torch.equal(before, torch.get_rng_state())

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{type(self._module).__name__} {reason}")

    def _first_difference(
        self,
        found: dict[str, Any],
        expected: dict[str, Any],
        rounding: Callable[[torch.dtype], float],
    ) -> str:
        largest = max((_largest(each) for each in expected.values()), default=0.0)
        for what, theirs in expected.items():
            if reason := _difference(found[what], theirs, rounding, largest):
                return f"{what} {reason}"
        return ""

    def _rounding(self, dtype: torch.dtype) -> float:
        return LOW_ROUNDING if self._is_low else ROUNDING.get(dtype, LOW_ROUNDING)

    def _loosely(self, dtype: torch.dtype) -> float:
        return min(100 * self._rounding(dtype), 0.2)  # sums of other lengths

    def _values(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self._tensors.items()}

    def _new_values(self) -> dict[str, Tensor]:
        return {f"the new value of {name!r}": each for name, each in self._values().items()}

    def _give(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].data.copy_(value)

    def _results(
        self, call: Callable[[Any], Any], batch: Any, scale: float, turn: int
    ) -> dict[str, Any]:
        """Return what a call gives, by what it is: outputs, gradients of all parameters."""
        training = self._module.training
        structure, outputs = self._called(call, batch, training, turn)
        results: dict[str, Any] = {"the form of what it returns": structure}
        for number, each in enumerate(outputs):
            results[f"output {number}"] = _detached(each)
            if isinstance(each, Tensor):
                results[f"whether output {number} needs a gradient"] = each.requires_grad
        if training:
            _backward(outputs, _drawn(outputs, scale))
        return results | dict(self._gradients())

    def _called(
        self, call: Callable[[Any], Any], batch: Any, differentiates: bool, turn: int
    ) -> tuple[Structure, list[Any]]:
        torch.manual_seed(turn)
        region = torch.autocast("cpu", self._autocast, enabled=self._autocast is not None)
        try:
            with torch.set_grad_enabled(differentiates), region:
                return flatten(call(_copied(batch)))
        except ConfigError:
            raise
        except Exception as error:
            raise self.error(f"fails on the first samples: {one_line(error)}") from error

    def _call_module(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self._module(**batch)
        return self._module(*(batch if isinstance(batch, tuple | list) else [batch]))

    def _call_layers(self, batch: Any) -> Any:
        for layer in self._layers:
            batch = layer(batch)
        return batch

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each parameter's gradient, the last parameter's first, and forget them."""
        seen: set[int] = set()
        for name, tensor in reversed(self._tensors.items()):
            if id(tensor) in seen or not tensor.requires_grad:
                continue
            seen.add(id(tensor))
            copies = [tensor, *self._copies.get(id(tensor), ())]
            known = [each.grad for each in copies if each.grad is not None]
            for each in copies:
                each.grad = None
            yield f"the gradient of {name!r}", sum(known[1:], known[0]) if known else None

    def _require_plain(self, seen: SideEffects, turn: int) -> None:
        """Refuse what a forward does that may matter later, whatever it has computed now."""
        self._seen.add(seen)
        if seen.hooks:
            hooks = some_of(seen.hooks)
            raise self.error(f"puts hooks on tensors, which its layers lose: {hooks}\n{BY_HAND}")
        kinds = seen.changed
        if drawn := [name for name, kind in kinds.items() if kind == "generator"]:
            raise self.error(
                f"draws from {some_of(drawn)}, which would stay for ever what it was while the "
                "module was cut: draw from torch's own generator, by operations on tensors, or "
                f"{BY_HAND}"
            )
        counts = {name for name, kind in kinds.items() if kind == "number"}
        if turn and (counted := counts & self._changed_before):  # and no cache of the first call
            raise self.error(
                f"changes {some_of(sorted(counted))} in each forward, which would stay for ever "
                "what it was while the module was cut: make it a buffer (`register_buffer`) that "
                f"is changed in place, or {BY_HAND}"
            )
        self._changed_before = counts

    def _causes(self) -> str:
        found = []
        if self._seen.has_checkpoints:
            found.append(
                "it calls torch.utils.checkpoint with use_reentrant=True: set use_reentrant=False, "
                "or leave it out and let the stages recompute (`recompute = true`)"
            )
        if self._seen.functions:
            listed = some_of(self._seen.functions)
            found.append(f"an autograd.Function's own backward is lost in a cut: {listed}")
        if self._seen.changed:
            found.append(f"its forward changes {some_of(sorted(self._seen.changed))}")
        return "".join(f"; {each}" for each in found)


def _copied(batch: Any) -> Any:
    """Return a mini-batch of its own for one call, which may change it."""
    if isinstance(batch, dict):
        return {name: each.clone() for name, each in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(each.clone() for each in batch)
    return batch.clone()


def _drawn(outputs: Sequence[Any], scale: float) -> list[Tensor | None]:
    """Return a gradient for each output that needs one, the same for the same outputs."""
    generator = torch.Generator().manual_seed(1)
    return [
        scale * torch.randn(each.shape, dtype=each.dtype, generator=generator)
        if isinstance(each, Tensor) and each.requires_grad
        else None
        for each in outputs
    ]


def _backward(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    needed = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if needed:
        torch.autograd.backward([outputs[n] for n in needed], [gradients[n] for n in needed])


def _joined(batches: Sequence[Any]) -> Any:
    if isinstance(batches[0], dict):
        return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
    if isinstance(batches[0], tuple | list):
        return tuple(map(torch.cat, zip(*batches, strict=True)))
    return torch.cat(list(batches))


def _rows(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor; 0 without one."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch.shape[0] if batch.dim() else 0


def _some_rows_differ(
    ours: Tensor, theirs: Tensor, rounding: Callable[[torch.dtype], float]
) -> bool:
    """Whether a few samples differ, and by far not all."""
    largest = _largest(theirs)
    pairs = zip(ours, theirs, strict=True)
    differing = sum(bool(_difference(*pair, rounding, largest)) for pair in pairs)
    return 0 < differing <= len(theirs) / 3


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not _counts(value):
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max().float())


def _counts(value: Tensor) -> bool:
    """Whether a tensor has numbers that are rounded."""
    is_rounded = value.is_floating_point() or value.is_complex()
    return is_rounded and value.numel() > 0 and value.layout is torch.strided


def _difference(
    ours: Any, theirs: Any, rounding: Callable[[torch.dtype], float], largest: float
) -> str:
    """Say how two results differ; empty if they do not, beyond rounding."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        if ours is theirs or (type(ours) is type(theirs) and ours == theirs):
            return ""
        shown = [
            "a tensor" if isinstance(each, Tensor) else "nothing" if each is None else repr(each)
            for each in (ours, theirs)
        ]
        return f"is {shown[0]} in layers, and {shown[1]} as it is"
    if (ours.shape, ours.dtype, ours.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"is {ours.dtype}{list(ours.shape)}, and {theirs.dtype}{list(theirs.shape)} as it is"
    if ours.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    if bool(same.all()):
        return ""
    if not _counts(theirs):
        return f"differs in {int((~same).sum())} of {same.numel()} numbers"
    apart = float((ours - theirs)[~same].abs().max().double())
    limit = rounding(theirs.dtype)
    if apart <= limit * max(_largest(theirs), IN_ALL * largest):
        return ""
    return f"is up to {apart:.3g} apart, of numbers up to {_largest(theirs):.3g}"
