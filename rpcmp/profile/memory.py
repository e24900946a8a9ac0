"""Bytes of what a layer keeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Storages:
    """The memory of tensors, counted once where several share it."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._sizes: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    @property
    def num_bytes(self) -> int:
        """Of all of them together."""
        return sum(self._sizes.values())

    def add(self, tensor: Tensor) -> None:
        """Count one more; its memory must not be freed and used again as long as this counts."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()

    def without(self, others: Storages) -> int:
        """Bytes that none of `others` has."""
        own = self._sizes.items()
        return sum(size for pointer, size in own if pointer not in others._sizes)
