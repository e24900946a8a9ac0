"""One hash for a model, recomputed here from the format that rpcmp.rpc.tensors documents."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from torch import Tensor

import rpcmp
from rpcmp.rpc import tensors

STATE = {
    "conv.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bn.num_batches_tracked": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


def test_the_hash_follows_the_documented_format() -> None:
    bytes_of = {
        "bn.num_batches_tracked": struct.pack("<q", 7),
        "conv.weight": struct.pack("<6f", *range(6)),
        "mask": b"\x01\x00",
    }
    kinds = {
        "bn.num_batches_tracked": b"int64\0",
        "conv.weight": b"float32\x002,3",
        "mask": b"bool\x002",
    }
    whole = hashlib.sha256()
    for name in sorted(bytes_of):
        content = hashlib.sha256(bytes_of[name]).hexdigest().encode()
        whole.update(name.encode() + b"\0" + kinds[name] + b"\0" + content + b"\n")
    assert rpcmp.parameters_sha256(STATE) == whole.hexdigest()


def test_bfloat16_is_hashed_by_its_bytes() -> None:
    one = hashlib.sha256(b"\x80\x3f").hexdigest()
    line = tensors.tensor_line("w", torch.ones(1, dtype=torch.bfloat16))
    assert line == f"w\0bfloat16\x001\0{one}\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_an_empty_tensor_has_a_hash(dtype: torch.dtype) -> None:
    line = tensors.tensor_line("w", torch.empty(2, 0, dtype=dtype))
    assert line.endswith(f"\x002,0\0{hashlib.sha256().hexdigest()}\n")


def test_the_hash_ignores_the_order_and_the_owner_of_tensors() -> None:
    backwards = dict(reversed(STATE.items()))
    lines = {name: tensors.tensor_line(name, tensor) for name, tensor in backwards.items()}
    whole = tensors.parameters_sha256(STATE)
    assert tensors.parameters_sha256(backwards) == tensors.combine_digests(lines) == whole


def test_the_hash_ignores_strides_and_gradients() -> None:
    weight = STATE["conv.weight"]
    strided = torch.nn.Parameter(weight.T.contiguous().T)
    assert not strided.is_contiguous()
    assert tensors.tensor_line("w", strided) == tensors.tensor_line("w", weight)
    every_second = torch.tensor([1.0, 9.0, 2.0, 9.0])[::2]
    assert tensors.tensor_line("w", every_second) == tensors.tensor_line(
        "w", torch.tensor([1.0, 2.0])
    )


def flipped(tensor: Tensor) -> Tensor:
    """Return `tensor` with its last bit changed."""
    changed = tensor.clone()
    changed.view(torch.uint8).reshape(-1)[-1] ^= 1
    return changed


@pytest.mark.parametrize(
    "other",
    [
        {**STATE, "conv.weight": STATE["conv.weight"].reshape(3, 2)},
        {**STATE, "conv.weight": STATE["conv.weight"].view(torch.int32)},
        {**STATE, "conv.weight": flipped(STATE["conv.weight"])},
        {**STATE, "mask": torch.tensor([False, True])},
        {**STATE, "bn.num_batches_tracked": torch.tensor([7])},
        {name.replace("conv", "cnov"): tensor for name, tensor in STATE.items()},
        {name: tensor for name, tensor in STATE.items() if name != "mask"},
        {**STATE, "extra": torch.empty(0)},
        {},
    ],
    ids=["shape", "dtype", "bit", "swap", "rank", "name", "less", "more", "none"],
)
def test_any_change_changes_the_hash(other: dict[str, Tensor]) -> None:
    assert tensors.parameters_sha256(other) != tensors.parameters_sha256(STATE)


def test_negative_zero_is_not_zero() -> None:
    minus, zero = torch.tensor(-0.0), torch.tensor(0.0)
    assert tensors.tensor_line("w", minus) != tensors.tensor_line("w", zero)
    assert not tensors.same_bits(minus, zero)


def test_tensors_with_the_same_bits_have_one_dtype_and_shape() -> None:
    tensor = torch.tensor([0.0, float("nan")])
    assert tensors.same_bits(tensor, tensor.clone())
    for other in (flipped(tensor), tensor.view(torch.int32), tensor.reshape(1, 2)):
        assert not tensors.same_bits(tensor, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000])
def test_any_element_changes_the_checksum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).to(dtype)
    before = tensors.checksum({"a": tensor})
    assert tensors.checksum({"a": tensor.clone()}) == before
    assert tensors.checksum({"b": tensor}) != before
    assert tensors.checksum({"a": tensor.reshape(1, size)}) != before
    for place in {0, size // 2, size - 1} if size else ():
        changed = tensor.clone()
        changed[place] = not changed[place]
        assert tensors.checksum({"a": changed}) != before


def test_the_checksum_ignores_where_a_tensor_lies() -> None:
    tensor = torch.arange(24, dtype=torch.int8)
    assert tensors.checksum({"a": tensor[3:20]}) == tensors.checksum({"a": tensor[3:20].clone()})
    matrix = torch.randn(3, 5)
    assert tensors.checksum({"a": matrix.T}) == tensors.checksum({"a": matrix.T.contiguous()})
