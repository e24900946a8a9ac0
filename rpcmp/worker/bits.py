"""Whether tensors are the same, bit for bit: minus zero is not zero, not-a-number is itself."""

from __future__ import annotations

import torch
from torch import Tensor


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether both are of one dtype and shape and have the same bits, on whichever devices."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [
        tensor.detach().to(one.device).contiguous().reshape(-1).view(torch.uint8)
        for tensor in (one, other)
    ]
    return torch.equal(*bits)
