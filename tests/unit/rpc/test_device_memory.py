"""Handles of CUDA's memory: what travels, and what is believed of it."""

from __future__ import annotations

import inspect
import json
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rpcmp.errors import SecurityError
from rpcmp.rpc import device_memory
from rpcmp.rpc.device_memory import HANDLE_FIELDS, CudaMemory

CPU = torch.device("cpu")

FIELDS: dict[str, Any] = {
    "storage_handle": b"\x01handle",
    "storage_size_bytes": 4096,
    "storage_offset_bytes": 512,
    "ref_counter_handle": b"/torch_1_2",
    "ref_counter_offset": 3,
    "event_handle": b"\xffevent",
    "event_sync_required": True,
}


@pytest.fixture
def host() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let CUDA be memory of the host, and return what its memory was opened with."""
    calls: list[dict[str, Any]] = []
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    original = reductions.rebuild_cuda_tensor

    def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        known: dict[str, Any] = {"tensor_cls": torch.Tensor, "storage_device": 0, **FIELDS}
        return original, tuple(known.get(name) for name in names)

    def rebuild(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return torch.zeros(arguments["tensor_size"], dtype=arguments["dtype"])

    uuids = ["GPU-a", "GPU-b"]
    module = SimpleNamespace(
        device_count=lambda: len(uuids),
        get_device_properties=lambda device: SimpleNamespace(
            uuid=uuids[device if isinstance(device, int) else 1]
        ),
    )
    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return calls


def test_torch_opens_memory_of_cuda_by_these_fields() -> None:
    names = set(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    known = {"tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"}
    assert names == {*known, "storage_device", "requires_grad", *HANDLE_FIELDS}


def test_a_handle_opens_the_same_device_by_whatever_index(
    host: mmap.mmap, rebuilt: list[dict[str, Any]]
) -> None:
    made = CudaMemory.create(CPU, host)
    opened = CudaMemory.open(made.handle, host)
    (arguments,) = rebuilt
    assert {name: arguments[name] for name in HANDLE_FIELDS} == FIELDS
    assert arguments["storage_device"] == 1
    assert arguments["tensor_size"] == (4096,)
    assert opened.part(8, 16).shape == (16,)
    assert opened.device == made.device == CPU
    assert made.part(0, 0).numel() == 0


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"uuid": "GPU-c"}, RuntimeError, "GPU-c is not visible here"),
        ({"storage_size_bytes": 4095}, SecurityError, "smaller than it says"),
        ({"storage_size_bytes": True}, SecurityError, "fields of other types"),
        ({"event_sync_required": 1}, SecurityError, "fields of other types"),
        ({"event_handle": "no hex"}, SecurityError, "nobody can read"),
        ({"event_handle": 7}, SecurityError, "nobody can read"),
        ({"uuid": None}, SecurityError, "fields of other types"),
        ({"storage_offset_bytes": -1}, SecurityError, "leads outside of it"),
        ({"ref_counter_offset": -1}, SecurityError, "leads outside of it"),
        ({"ref_counter_offset": 10_000}, SecurityError, "leads outside of it"),
        ({"ref_counter_handle": b"/rpcmp-log".hex()}, SecurityError, "leads outside of it"),
        ({"ref_counter_handle": b"/torch_1/../x".hex()}, SecurityError, "leads outside of it"),
    ],
)
def test_a_handle_is_not_believed_but_read(
    change: dict[str, Any],
    kind: type[Exception],
    message: str,
    host: mmap.mmap,
    rebuilt: list[dict[str, Any]],
) -> None:
    fields = json.loads(CudaMemory.create(CPU, host).handle)
    with pytest.raises(kind, match=message):
        CudaMemory.open(json.dumps(fields | change).encode(), host)
    assert rebuilt == []


@pytest.mark.parametrize("handle", [b"", b"\xff", b"[]", b"{}", b"[" * 10000])
def test_what_is_no_handle_is_refused(handle: bytes) -> None:
    with pytest.raises(SecurityError, match="nobody can read"):
        device_memory._parsed(handle)
