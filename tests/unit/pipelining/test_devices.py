"""Devices by their name in a config."""

from __future__ import annotations

import pytest
import torch

from rpcmp.pipelining import devices


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_if_available(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert devices.resolve_device("auto") == torch.device(expected)


def test_other_names_come_from_torch() -> None:
    assert devices.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="gpu"):
        devices.resolve_device("gpu")
