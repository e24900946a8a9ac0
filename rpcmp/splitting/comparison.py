"""How far two results may be apart and still be one: by rounding, never by what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5}
"""How far two results may be apart, in parts of the largest number; LOW_ROUNDING of others."""

LOW_ROUNDING = 0.02

IN_ALL = 0.01
"""What is so much less than the largest of all results, in units of their rounding, is none."""

Rounding = Callable[[torch.dtype], float]


def first_difference(found: dict[str, Any], expected: dict[str, Any], rounding: Rounding) -> str:
    """Say which result differs first, and how; empty if none does, beyond rounding.

    Args:
        found, expected: by what they are, in words.
        rounding: how far numbers of a dtype may be apart, in parts of the largest.
    """
    most = max((largest(each) for each in expected.values()), default=0.0)
    for what, theirs in expected.items():
        if reason := difference(found[what], theirs, rounding, most):
            return f"{what} {reason}"
    return ""


def largest(value: Any) -> float:
    """Return the largest number of a tensor that is rounded; 0 of anything else."""
    if not isinstance(value, Tensor) or not _counts(value):
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max().float())


def _counts(value: Tensor) -> bool:
    """Whether a tensor has numbers that are rounded."""
    is_rounded = value.is_floating_point() or value.is_complex()
    return is_rounded and value.numel() > 0 and value.layout is torch.strided


def difference(ours: Any, theirs: Any, rounding: Rounding, most: float) -> str:
    """Say how two results differ; empty if they do not, beyond rounding.

    Args:
        most: the largest number of all results, beside which a small one is noise.
    """
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
    if apart <= limit * max(largest(theirs), IN_ALL * most):
        return ""
    return f"is up to {apart:.3g} apart, of numbers up to {largest(theirs):.3g}"


def some_rows_differ(ours: Tensor, theirs: Tensor, rounding: Rounding) -> bool:
    """Whether a few samples differ, and by far not all."""
    most = largest(theirs)
    pairs = zip(ours, theirs, strict=True)
    differing = sum(bool(difference(*pair, rounding, most)) for pair in pairs)
    return 0 < differing <= len(theirs) / 3
