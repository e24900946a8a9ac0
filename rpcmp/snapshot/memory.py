"""What a file of named tensors does not say: which of them are one tensor, and how each lies.

A matrix that was made column by column multiplies with other bits than its row-major copy, and an
optimizer that keeps one tensor under two keys updates both at once. So the names of equal tensors
and the order of dimensions in memory are stored beside the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return each distinct tensor under its first name, and what `Restored` needs besides, as JSON.

    Two tensors are one if they have the same memory, shape, strides and dtype. Views that overlap
    otherwise become independent.
    """
    distinct: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    orders: dict[str, list[int]] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = _place(tensor)
        if key is not None and key in first:
            same[name] = first[key]
            continue
        first[key] = name
        distinct[name] = tensor
        if order := _order(tensor):
            orders[name] = order
    return distinct, {"same": same, "orders": orders}


class Restored(Mapping[str, Tensor]):
    """The tensors that `described` was given, out of contiguous ones by their first names.

    Args:
        tensors: by name.
        about: what `described` returned besides.
    """

    def __init__(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._same: Mapping[str, str] = about.get("same", {})
        self._orders: Mapping[str, list[int]] = about.get("orders", {})
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        name = self._same.get(name, name)
        if name not in self._found:
            self._found[name] = _laid_out(self._tensors[name], self._orders.get(name))
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._same

    def __len__(self) -> int:
        return len(self._tensors) + len(self._same)


def _place(tensor: Tensor) -> Any:
    """What two tensors have in common that are one; None for such as have no memory to share."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else None


def _order(tensor: Tensor) -> list[int] | None:
    """The dimensions by how they lie in memory, outermost first; None: as a contiguous tensor's,
    or with holes or overlaps, which are not kept."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _laid_out(tensor: Tensor, order: list[int] | None) -> Tensor:
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)
