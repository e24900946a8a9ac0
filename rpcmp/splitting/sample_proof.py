"""Prove that micro-batches of a module that is cut are as good as the mini-batch of them.

    a mini-batch, in evaluation     ──> outputs, gradients of all parameters ──┐
    each micro-batch of it          ──> outputs, gradients, summed  ───────────┴─> equal?

Batch normalization and dropout are off then, but for one without statistics of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import one_line
from rpcmp.splitting.comparison import some_rows_differ
from rpcmp.splitting.side_by_side import SideBySide, backward, drawn

BY_PARTS = (
    'set num_microbatches = 1, or loss_scope = "micro-batch" if a micro-batch is what is meant'
)
"""What is left where results depend on how a mini-batch is cut."""


def require_independent(pair: SideBySide, batches: Sequence[Any]) -> None:
    """Check that neither outputs nor sums of gradients depend on what is computed together.

    Args:
        batches: two of them or more, as micro-batches.

    Raises:
        ConfigError: they do, and how.
    """
    pair.set_mode(training=False)
    if pair.needs_two_samples:
        return
    before, sizes = pair.values(), [_rows(batch) for batch in batches]
    _, whole = pair.called(pair.call_module, _joined(batches), True, 0)
    if pair.draws(batches[0]):
        return  # also in evaluation, and for other samples other numbers
    of_samples = [isinstance(each, Tensor) and _rows(each) == sum(sizes) for each in whole]
    gradients = [
        gradient if is_one else None
        for gradient, is_one in zip(drawn(whole, 1.0), of_samples, strict=True)
    ]
    try:
        backward(whole, gradients)
    except RuntimeError as error:
        raise pair.error(
            f"cannot be differentiated after a further forward ({one_line(error)}): {BY_PARTS}"
        ) from error
    expected = dict(pair.gradients())
    pair.give(before)
    parts = _outputs_apart(pair, batches, gradients)
    pair.give(before)
    found = dict(pair.gradients())
    for number, (each, *pieces) in enumerate(zip(whole, *parts, strict=True)):
        if of_samples[number]:
            joined = torch.cat([piece.detach() for piece in pieces])
            if some_rows_differ(joined, each.detach(), pair.loosely):
                return  # by rounding, where a decision hangs on it
            expected[f"output {number}"], found[f"output {number}"] = each.detach(), joined
    if difference := pair.first_difference(found, expected, loosely=True):
        raise pair.error(
            "computes something else for samples in two micro-batches than for all of them "
            f"together: {difference}; {BY_PARTS}"
        )


def _outputs_apart(
    pair: SideBySide, batches: Sequence[Any], gradients: Sequence[Tensor | None]
) -> list[list[Any]]:
    """Return the outputs of each micro-batch, after its backward with its rows of `gradients`."""
    parts, ends = [], list(itertools.accumulate(map(_rows, batches)))
    for batch, start, end in zip(batches, [0, *ends], ends, strict=False):
        _, outputs = pair.called(pair.call_module, batch, True, 0)
        own = [each if each is None else each[start:end] for each in gradients]
        for one, gradient in zip(outputs, own, strict=True):
            if gradient is not None and one.shape != gradient.shape:
                raise pair.error(
                    f"returns {list(gradient.shape)} of some samples of a mini-batch, and "
                    f"{list(one.shape)} if they are a micro-batch: {BY_PARTS}"
                )
        backward(outputs, own)
        parts.append(outputs)
    return parts


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
