"""Comparison of tensors that may differ in their last bits.

`torch.testing.assert_close` does the same, but imports half of torch.distributed and SymPy. That
takes more than a second in each process that runs tests.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_near(found: Tensor, expected: Tensor, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """Fail unless shapes and dtypes are equal, and each number is near.

    Args:
        rtol: tolerance relative to the expected number; the default is assert_close's for float32.
        atol: tolerance that is added to it, with the same default.
    """
    kinds = [(each.dtype, tuple(each.shape)) for each in (found, expected)]
    assert kinds[0] == kinds[1], f"{kinds[0]} instead of {kinds[1]}"
    if torch.allclose(found, expected, rtol=rtol, atol=atol):
        return
    excess = (found - expected).abs() - atol - rtol * expected.abs()
    worst = int(excess.nan_to_num(nan=torch.inf).argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(worst), expected.shape))
    raise AssertionError(
        f"{int((~torch.isclose(found, expected, rtol=rtol, atol=atol)).sum())} of "
        f"{expected.numel()} numbers are not near; the farthest is {found[index].item()} instead "
        f"of {expected[index].item()}, at {list(index)}"
    )
