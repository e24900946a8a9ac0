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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, some_of
from rpcmp.splitting import sample_proof
from rpcmp.splitting.exporting import BY_HAND
from rpcmp.splitting.side_by_side import SideBySide, backward, drawn
from rpcmp.splitting.side_effects import SideEffects, backward_hooks, functions_of, observed
from rpcmp.splitting.split import Split

SCALES = (1.0, 1000.0, 0.0)
"""Sizes of the outputs' gradients: a true derivative grows with them, and is zero with zero."""


def prove(
    module: nn.Module,
    split: Split,
    batches: Sequence[Any],
    autocast: torch.dtype | None = None,
    in_microbatches: bool = True,
    name: str = "",
) -> SideEffects:
    """Check the layers of a cut against the module, and micro-batches against a mini-batch.

    Args:
        module: with values of its parameters; its buffers and attributes change.
        batches: what it is called with, two of them or more, a few samples each.
        in_microbatches: whether a mini-batch has several, and they ought to be as good as one.
        name: of the module, in messages; its class when omitted.

    Returns:
        What the module does besides computing, and the comparison has covered.

    Raises:
        ConfigError: they differ, or may later, and why.
    """
    with _as_exported():
        pair = SideBySide(module, split, autocast, name or type(module).__name__)
        proof = _Proof(pair)
        require_no_hooks(module, pair.name)
        for training in (True, False):
            for turn, scale in enumerate(SCALES if training else SCALES[:2]):
                # Only what is no derivative may give gradients of none.
                if scale or proof.has_own_gradients:
                    proof.compare(batches[turn % len(batches)], training, turn, scale)
        if in_microbatches:
            sample_proof.require_independent(pair, batches)
        return proof.guard.seen


@contextlib.contextmanager
def _as_exported() -> Iterator[None]:
    """Let torch's transformer layers compute in evaluation what they do in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which leaves padding at zero
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Proof:
    """Compares a module with its layers."""

    def __init__(self, pair: SideBySide) -> None:
        self._pair, self.guard = pair, Guard(pair.name)

    @property
    def has_own_gradients(self) -> bool:
        return bool(self.guard.seen.functions) or self.guard.seen.has_checkpoints

    def compare(self, batch: Any, training: bool, turn: int, scale: float) -> None:
        """Call both with a mini-batch; raises ConfigError if they differ.

        Args:
            turn: how often both were called in this mode before.
            scale: size of the outputs' gradients.
        """
        pair = self._pair
        pair.set_mode(training)
        before = pair.values()
        with observed(pair.module) as seen:
            expected = self._results(pair.call_module, batch, scale, turn, seen)
        self.guard.check(seen, turn)
        expected |= pair.new_values()
        pair.give(before)
        found = self._results(pair.call_layers, batch, scale, turn, SideEffects())
        found |= pair.new_values()
        if difference := pair.first_difference(found, expected):
            mode = "training" if training else "evaluation"
            raise pair.error(
                f"computes something else in layers than as it is: in {mode}, {difference}"
                f"{self.guard.causes()}\n{BY_HAND}"
            )

    def _results(
        self, call: Callable[[Any], Any], batch: Any, scale: float, turn: int, seen: SideEffects
    ) -> dict[str, Any]:
        """Return what a call gives, by what it is: outputs, gradients of all parameters.

        Args:
            seen: gets the Functions that were called.
        """
        training = self._pair.module.training
        structure, outputs = self._pair.called(call, batch, training, turn)
        results: dict[str, Any] = {"the form of what it returns": structure}
        for number, each in enumerate(outputs):
            results[f"output {number}"] = each.detach() if isinstance(each, Tensor) else each
            if isinstance(each, Tensor):
                results[f"whether output {number} needs a gradient"] = each.requires_grad
        seen.add(functions_of(outputs))
        if training:
            backward(outputs, drawn(outputs, scale))
        return results | dict(self._pair.gradients())


def require_no_hooks(module: nn.Module, name: str) -> None:
    """Refuse hooks of gradients, which a module has before any forward."""
    if hooks := backward_hooks(module):
        raise ConfigError(
            f"{name} has hooks of gradients, which its layers lose: {some_of(hooks)}\n{BY_HAND}"
        )


class Guard:
    """Refuses what a module's forward does besides computing, whatever it has computed now.

    Args:
        name: of the module, in messages.

    Attributes:
        seen: what its forwards did besides computing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.seen = SideEffects()
        self._changed_before: set[str] = set()

    def check(self, seen: SideEffects, turn: int) -> None:
        """Check a forward.

        Args:
            turn: how often the module was called in this mode before.

        Raises:
            ConfigError: it has left hooks, drawn from other generators than torch's, or changes
                plain numbers each time.
        """
        self.seen.add(seen)
        if seen.hooks:
            hooks = some_of(seen.hooks)
            raise self._error(f"puts hooks on tensors, which its layers lose: {hooks}\n{BY_HAND}")
        kinds = seen.changed
        if drawn := [name for name, kind in kinds.items() if kind == "generator"]:
            raise self._error(
                f"draws from {some_of(drawn)}, which would stay for ever what it was while the "
                "module was cut: draw from torch's own generator, by operations on tensors, or "
                f"{BY_HAND}"
            )
        if flags := [name for name, kind in kinds.items() if kind == "flag"]:
            raise self._error(
                f"changes {some_of(flags)} in its forward, which its layers do not: freeze "
                f"parameters in the constructor, or by `frozen` of their stage, or {BY_HAND}"
            )
        counts = {name for name, kind in kinds.items() if kind == "number"}
        if turn and (counted := counts & self._changed_before):  # and no cache of the first call
            raise self._error(
                f"changes {some_of(sorted(counted))} in each forward, which would stay for ever "
                "what it was while the module was cut: make it a buffer (`register_buffer`) that "
                f"is changed in place, or {BY_HAND}"
            )
        self._changed_before = counts

    def causes(self) -> str:
        """Say what is known to make layers differ from a module, of what was seen."""
        found = []
        if self.seen.has_checkpoints:
            found.append(
                "it calls torch.utils.checkpoint with use_reentrant=True: set use_reentrant=False, "
                "or leave it out and let the stages recompute (`recompute = true`)"
            )
        if self.seen.functions:
            listed = some_of(self.seen.functions)
            found.append(f"an autograd.Function's own backward is lost in a cut: {listed}")
        if self.seen.changed:
            found.append(f"its forward changes {some_of(sorted(self.seen.changed))}")
        return "".join(f"; {each}" for each in found)

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._name} {reason}")
