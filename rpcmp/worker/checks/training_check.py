"""Refuse a forward that takes a micro-batch for the mini-batch, in its first training step.

    a few samples, in training         ──> outputs ──┐
    both halves of them, in turn       ──> outputs ──┴─> equal?

`rpcmp.driver.sample_check` asks the same of an evaluation. What is done in training alone is seen
here, such as a center that is subtracted. Batch normalization and dropout are known to depend on
micro-batches, and are in evaluation meanwhile. What a forward keeps: `second_forward`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import pytree, random_streams
from rpcmp.worker.checks.objective import joined, own_tape
from rpcmp.worker.state.forward_state import ForwardState

log = logging.getLogger(__name__)

OF_MICROBATCHES = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
"""Of torch's modules those that depend on micro-batches, which everybody knows."""

ROUNDING = {torch.float64: 1e-8, torch.float32: 0.01}
"""How far outputs may be apart, in parts of the largest; LOW_ROUNDING of other dtypes."""

LOW_ROUNDING = 0.2

WAYS_OUT = 'set num_microbatches = 1, or loss_scope = "micro-batch" if a micro-batch is meant'

Forward = Callable[[list[Any], bool], Any]
"""Returns outputs for inputs; True: with other random numbers."""


def require_independent(
    forward: Forward, parts: Sequence[list[Any]], samples: Sequence[int], state: ForwardState
) -> None:
    """Check that outputs of samples do not depend on those that are computed with them.

    Args:
        parts: inputs of some samples and of some more.
        samples: how many each part has.
        state: what a forward may change; it is put back.

    Raises:
        ConfigError: they do.
    """
    before = state.copy()
    try:
        with isolated():
            together, again = (forward(joined(*parts), is_other) for is_other in (False, True))
            if any(differences(together, [again], [1])):
                return  # it draws random numbers, or carries on what `second_forward` has named
            alone = [forward(part, False) for part in parts]
            reason = next(differences(together, alone, samples), "")
    except Exception as error:
        tell_not_tried(error)
        return
    finally:
        state.put_back(before)
    if reason:
        raise ConfigError(f"in training, {reason}, so micro-batches are no mini-batch: {WAYS_OUT}")


def require_linear_backward(
    forward: Forward,
    parts: Sequence[list[Any]],
    samples: Sequence[int],
    trained: Sequence[Tensor],
    state: ForwardState,
    what: str,
) -> None:
    """Check that gradients of samples add up: what a hook or a Function does to them may not.

    Args:
        parts: inputs of some samples and of some more.
        samples: how many each part has.
        trained: what gradients are computed of.
        state: what a forward may change; it is put back.
        what: changes gradients, in messages.

    Raises:
        ConfigError: they do not.
    """
    before = state.copy()
    try:
        with isolated():
            whole = _differentiated(forward(joined(*parts), False), sum(samples))
            pieces = [
                _differentiated(forward(part, False), count)
                for part, count in zip(parts, samples, strict=True)
            ]
            ends = [0, *itertools.accumulate(samples)]
            do_not_add_up = [
                _apart_by(whole, pieces, ends, trained, size) for size in SIZES if whole and trained
            ]
    except Exception as error:
        tell_not_tried(error)
        return
    finally:
        state.put_back(before)
    if any(do_not_add_up):
        raise ConfigError(
            f"{what}: the gradients of samples in two micro-batches do not add up to those of all "
            f"of them, since it is not linear: {WAYS_OUT}"
        )


SIZES = (1e-3, 1.0, 1e3)
"""Of the gradients that are tried."""

GRADIENTS_ROUNDING = 0.05


def _differentiated(outputs: Any, count: int) -> list[Tensor]:
    """Return the outputs that have a gradient and rows of samples."""
    tensors = [each for each in pytree.tensors(outputs) if each.requires_grad and each.dim()]
    return [each for each in tensors if count and each.shape[0] % count == 0]


def _apart_by(
    whole: Sequence[Tensor],
    pieces: Sequence[Sequence[Tensor]],
    ends: Sequence[int],
    trained: Sequence[Tensor],
    size: float,
) -> bool:
    drawn = torch.Generator().manual_seed(1)
    gradients = [
        (size * torch.randn(each.shape, generator=drawn)).to(each.device, each.dtype)
        for each in whole
    ]
    together = _gradients(whole, gradients, trained)
    summed = [torch.zeros_like(each) for each in together]
    for outputs, start, end in zip(pieces, ends, ends[1:], strict=False):
        rows = [
            each[start * each.shape[0] // ends[-1] : end * each.shape[0] // ends[-1]]
            for each in gradients
        ]
        own = _gradients(outputs, rows, trained)
        summed = [a + b for a, b in zip(summed, own, strict=True)]
    largest = max(map(_largest, (*together, *summed)), default=0.0)
    gaps = [*map(_gap, together, summed)]
    return max(gaps, default=0.0) > GRADIENTS_ROUNDING * largest


def _gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], trained: Sequence[Tensor]
) -> list[Tensor]:
    found = torch.autograd.grad(outputs, trained, gradients, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(one) if each is None else each.detach().to_dense()
        for each, one in zip(found, trained, strict=True)
    ]


def tell_not_tried(error: Exception) -> None:
    """Tell why nothing can be compared: that it cannot do with single samples is no fault."""
    log.warning(
        "whether micro-batches are as good as the mini-batch cannot be tried, since a forward of a "
        "sample or two fails (%s)",
        one_line(error),
    )


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    with random_streams.kept(), torch.enable_grad(), own_tape():
        yield


@contextlib.contextmanager
def quiet(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave batch normalization and dropout in evaluation in this block."""
    found = [each for each in modules if isinstance(each, OF_MICROBATCHES) and each.training]
    for each in found:
        each.training = False
    try:
        yield
    finally:
        for each in found:
            each.training = True


def differences(together: Any, apart: Sequence[Any], samples: Sequence[int]) -> Iterator[str]:
    """Yield how outputs of parts differ from those of all; by tensors that are differentiated."""
    pairs = [pytree.tensors(each) for each in apart]
    for number, (whole, *pieces) in enumerate(zip(pytree.tensors(together), *pairs, strict=True)):
        if whole.layout is not torch.strided or whole.is_meta:
            continue
        if not whole.is_floating_point() or not whole.numel():
            continue
        what = f"output {number} of some samples"
        if _has_rows(whole, pieces):
            found = torch.cat([*pieces])
        elif not whole.requires_grad or {each.shape for each in pieces} != {whole.shape}:
            continue  # nothing that a loss could be computed of
        else:  # of all samples together, such as an auxiliary loss
            what = f"output {number}, which has no rows of samples,"
            found = sum(
                each * (count / sum(samples)) for each, count in zip(pieces, samples, strict=True)
            )
        gap = _gap(found.detach(), whole.detach())
        largest = max(_largest(each.detach()) for each in (whole, *pieces))
        if gap > ROUNDING.get(whole.dtype, LOW_ROUNDING) * largest:
            yield (
                f"{what} computed together is up to {gap:.3g} apart from that of two parts of "
                f"them, of numbers up to {largest:.3g}"
            )


def _has_rows(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    if not whole.dim() or any(each.shape[1:] != whole.shape[1:] for each in pieces):
        return False
    return bool(sum(each.shape[0] for each in pieces) == whole.shape[0])


def _largest(tensor: Tensor) -> float:
    """Return the largest finite size: masked logits have others."""
    sizes = tensor.abs()
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _gap(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart at most; what is infinite in both is not."""
    return float((one - other).abs().nan_to_num(nan=0.0).max()) if one.numel() else 0.0
