"""Devices by their name in a config, and what torch's module of their kind knows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpcmp.errors import ConfigError
from rpcmp.pipelining import devices
from rpcmp.worker.copies import Copies, copies_of

XPU = torch.device("xpu", 1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What torch has as the module of this machine's accelerator, which may lack functions."""
    found = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    accelerator, original = torch.device("xpu"), torch.get_device_module
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(
        torch, "get_device_module", lambda of: found if of.type == "xpu" else original(of)
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices._accelerators.cache_clear()
    yield found
    devices._accelerators.cache_clear()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch with CUDA built in, as pip installs it, on a machine without a GPU."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    for name, answer in {"is_available": False, "is_initialized": False, "device_count": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("get_device_properties", "manual_seed_all", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch, "Stream", refuse)
    devices._accelerators.cache_clear()
    yield
    devices._accelerators.cache_clear()


@pytest.mark.usefixtures("no_driver")
def test_cuda_without_a_driver_is_never_asked() -> None:
    assert devices.existing() == ["cpu"]
    assert devices.resolve_device("auto") == devices.CPU
    assert devices.candidates(["cuda:0", "auto"], 1) == ["cpu"]
    devices.seed_accelerator(7)
    for device in (devices.CPU, torch.device("meta")):
        devices.synchronize(device)
    assert devices.unique_id("cuda:0") == "cuda:0"
    assert not devices.is_lost(torch.AcceleratorError("CUDA error: no driver"))
    full = devices.memory_advice(torch.OutOfMemoryError("full"))
    assert full.startswith("; nothing in use by this stage")
    for device in (torch.device("meta"), torch.device("cuda", 0)):
        assert type(copies_of(device)) is Copies


def test_a_device_without_a_module_of_torchs_knows_nothing() -> None:
    meta = torch.device("meta")
    devices.synchronize(meta)
    assert devices.device_name(meta) == "meta"
    assert devices.available_bytes(meta) is None
    assert devices.MemoryMeter(meta).allocated() == 0
    assert devices.alike("meta") == []
    assert devices.unique_id("meta") == "meta"


def test_cuda_beside_the_accelerator_of_a_vendor(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.accelerator answers for the vendor's alone, and raises if it is asked about CUDA."""
    done: list[Any] = []
    module.manual_seed_all = lambda seed: done.append(("xpu", seed))
    for name, answer in {"is_available": True, "is_initialized": True, "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("manual_seed_all", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda what: done.append(("cuda", what)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**30)
    cuda = torch.device("cuda", 0)
    assert [devices.is_current(each) for each in (XPU, cuda, devices.CPU)] == [True, False, False]
    assert devices.existing() == ["cpu", "xpu:0", "xpu:1", "cuda:0"]
    assert devices.alike("cuda") == ["cuda:0"]
    assert devices.candidates(["auto", "cpu"], 0) == ["xpu:0", "xpu:1"]
    devices.seed_accelerator(7)
    devices.synchronize(cuda)
    assert done == [("xpu", 7), ("cuda", 7), ("cuda", cuda)]
    assert type(copies_of(cuda)) is Copies
    assert devices.is_lost(torch.AcceleratorError("CUDA error: uncorrectable ECC error"))
    full = devices.memory_advice(torch.OutOfMemoryError("full"))
    assert full.startswith("; 1.0 GiB in use on cuda:0 by this stage")


@pytest.mark.parametrize("name", ["meta", "cuda:99", "xpu:99", "hpu:0", "mps"])
@pytest.mark.usefixtures("no_driver")
def test_a_device_that_computes_nothing_here_is_an_error_that_names_those_that_do(
    name: str,
) -> None:
    begins = f"device = '{name}' is not available here, but cpu: "
    with pytest.raises(ConfigError, match=re.escape(begins)) as raised:
        devices.working_device(name)
    assert str(raised.value).endswith('; device = "auto" takes what a host has')
    assert len(str(raised.value)) > len(begins) + len('; device = "auto" takes what a host has')


@pytest.mark.usefixtures("no_driver")
def test_a_device_that_computes_is_known_by_its_number() -> None:
    assert [devices.working_device(name) for name in ("cpu:0", "auto")] == [devices.CPU] * 2


def test_a_device_that_is_full_is_not_one_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(torch.OutOfMemoryError):
        devices.working_device("cpu")


@pytest.mark.parametrize("expected", ["xpu", "cuda", None])
def test_auto_is_the_accelerator_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, expected: str | None
) -> None:
    def current_accelerator(check_available: bool) -> torch.device | None:
        assert check_available
        return None if expected is None else torch.device(expected)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert devices.resolve_device("auto") == torch.device(expected or "cpu")


def test_other_names_come_from_torch() -> None:
    assert devices.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="gpu"):
        devices.resolve_device("gpu")


def test_memory_and_name_are_what_the_accelerators_module_says(module: SimpleNamespace) -> None:
    def of(value: Any) -> Any:
        def answer(device: torch.device) -> Any:
            assert device == XPU
            return value

        return answer

    module.get_device_name, module.mem_get_info = of("Max 1100"), of((7, 9))
    module.memory_allocated, module.max_memory_allocated = of(3), of(5)
    assert devices.device_name(XPU) == "Max 1100"
    assert devices.available_bytes(XPU) == 7
    meter = devices.MemoryMeter(XPU)
    assert (meter.idle, meter.peak(), meter.allocated()) == (3, 5, 3)


def test_an_accelerator_that_counts_no_memory_has_its_process_measured(
    module: SimpleNamespace,
) -> None:
    assert devices.device_name(XPU) == "xpu"
    assert devices.available_bytes(XPU) is None
    meter = devices.MemoryMeter(XPU)
    assert 2**20 < meter.idle <= meter.peak()
    assert meter.allocated() == 0


@pytest.mark.parametrize("is_initialized", [True, False, None])
@pytest.mark.parametrize("name", ["manual_seed_all", "manual_seed"])
def test_only_an_accelerator_in_use_is_seeded(
    module: SimpleNamespace, is_initialized: bool | None, name: str
) -> None:
    seeds: list[int] = []
    setattr(module, name, seeds.append)
    if is_initialized is not None:  # MPS has no such function
        module.is_initialized = lambda: is_initialized
    devices.seed_accelerator(7)
    assert seeds == ([] if is_initialized is False else [7])


def test_a_device_that_is_full_is_reported_with_what_is_in_use(module: SimpleNamespace) -> None:
    module.memory_allocated = {torch.device("xpu", 0): 0, XPU: 3 * 2**30}.__getitem__
    full = devices.memory_advice(torch.OutOfMemoryError("full"))
    assert full.startswith("; 3.0 GiB in use on xpu:1 by this stage: give it recompute = true")
    assert devices.memory_advice(RuntimeError("full")) == ""


def test_stages_of_a_host_get_devices_that_exist(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.existing() == ["cpu", "xpu:0", "xpu:1"]
    wanted = ["auto", "cpu", "auto", "xpu:5"]
    found = [devices.settle(wanted, own) for own in range(4)]
    assert found == ["xpu:0", "cpu", "xpu:1", "xpu:5"]
    assert devices.candidates(wanted, 2) == ["xpu:1", "xpu:0"]
    assert devices.candidates(wanted, 3) == ["xpu:5"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert devices.settle(wanted, 2) == "cpu"


def test_scalars_keep_their_values_on_the_way_to_the_host() -> None:
    scalars = {name: torch.tensor(value) for name, value in {"a": 0.1, "b": float("nan")}.items()}
    assert devices.scalars_to_host(scalars) == scalars
    assert devices.scalars_to_host({}) == {}


def test_free_memory_is_what_a_container_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = devices.MemoryMeter(devices.CPU)
    free = meter.free()
    assert free is not None
    assert free > 0
    monkeypatch.setattr(devices, "CONTAINER", tmp_path)
    (tmp_path / "memory.current").write_text("900")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 100\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (meter.free() or 0) > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert meter.free() == 200
    (tmp_path / "memory.max").write_text("500\n")
    assert meter.free() == 0


@pytest.mark.parametrize(
    ("uuid", "expected"),
    [
        ("1b2c-3d", "1b2c-3d"),
        (b"\x01\xfe", "01fe"),
        (None, "cuda:1"),
        ("", "cuda:1"),
        (["no id"], "cuda:1"),
    ],
)
def test_a_device_is_known_by_its_unique_id(
    monkeypatch: pytest.MonkeyPatch, uuid: Any, expected: str
) -> None:
    class Properties:
        def __init__(self) -> None:
            if uuid is not None:
                self.uuid = uuid

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    assert devices.unique_id("cuda:1") == expected


def test_a_device_that_does_not_exist_is_known_by_its_name() -> None:
    assert devices.unique_id("cuda:77") == "cuda:77"
