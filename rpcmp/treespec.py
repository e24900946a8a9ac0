"""A tree of tensors as two parts: JSON that says what it is, and the tensors by name.

Like this trees go from process to process, from host to host and into files without pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

Spec = dict[str, Any]


def encode(value: Any, tensors: MutableMapping[str, Tensor], name: str = "") -> Spec:
    """What `value` is, as JSON; its tensors are added to `tensors`.

    Args:
        value: tensors, dtypes, numbers, strings and None, in tuples, lists and dicts of these.
        tensors: gets each tensor under the keys that lead to it, joined with dots.
        name: what these names begin with.

    Raises:
        TypeError: a leaf is neither a tensor nor plain.
    """
    if isinstance(value, Tensor):
        name = name or "tensor"
        while name in tensors:  # the keys 1 and "1", or "a.b" and "b" in "a"
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_plain(k), encode(v, tensors, _join(name, k))] for k, v in items]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(v, tensors, _join(name, i)) for i, v in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"value": _plain(value)}


def decode(spec: Spec, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `encode` was given."""
    ((kind, content),) = spec.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: decode(item, tensors) for key, item in content}
        case "tuple":
            return tuple(decode(item, tensors) for item in content)
        case "list":
            return [decode(item, tensors) for item in content]
        case "dtype":
            return _dtype(content)
    return content


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is neither a tensor nor a plain value")
