"""One hash for all parameters and buffers of a model, whoever holds them.

Each tensor's bytes are hashed where the tensor lives, and only these digests are put together: a
model that is larger than any one host never has to pass through one. The result is the same for
every balance, stage count and schedule, so two runs compare at a glance:

    sha256 of, for each tensor of the unsplit model's state_dict, sorted by name:
        name \\0 dtype \\0 shape \\0 sha256(little-endian bytes) \\n
    such as "conv.weight\\0float32\\032,1,3,3\\0" + 64 hex digits + "\\n"
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import torch


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """What one tensor contributes to the hash."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    content = hashlib.sha256(_little_endian_bytes(tensor)).hexdigest()
    return f"{name}\0{dtype}\0{shape}\0{content}\n"


def renamed(line: str, name: str) -> str:
    """A `tensor_line` as it is under another name."""
    return name + line[line.index("\0") :]


def combine(lines: Mapping[str, str]) -> str:
    """The hash of a model from its `tensor_line`s by name."""
    ordered = "".join(lines[name] for name in sorted(lines))
    return hashlib.sha256(ordered.encode()).hexdigest()


def parameters_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """The hash that a run's summary shows, for a state_dict of the unsplit model."""
    return combine({name: tensor_line(name, tensor) for name, tensor in state_dict.items()})


def _little_endian_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    data = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, tensor.element_size())[:, ::-1]
    return data.tobytes()
