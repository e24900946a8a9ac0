"""Unmodified modules: the stages give the bits of the module itself, which nobody has cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.driver.module_cut import cut_module
from tests.support.localgroup import require_same_bits
from tests.support.processes import JobFolder
from tests.zoo import architectures


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One folder for all tests: a module is cut once for each worker of pytest."""
    folder = tmp_path_factory.getbasetemp() / "cuts"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def cut(job: JobFolder, name: str, *overrides: str, schedule: str = "1f1b") -> Config:
    text = architectures.job(name, 3, schedule)
    config = loader.load_config(job.config(text), overrides)
    return config.with_cut(cut_module(config))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", ["language", "half frozen", "unet", "two by two"])
def test_a_module_is_trained_with_its_own_bits(job: JobFolder, name: str, schedule: str) -> None:
    require_same_bits(cut(job, name, schedule=schedule))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.balance=[1, 3, 1]"],
        ["stages=[{}, { replicas = 2 }, { recompute = true }]"],
        ["autocast=bfloat16"],
        ["autocast=float16", "loss_scaling={ initial = 128.0 }"],
        ["microbatches_per_message=2", "max_grad_norm=0.1"],
        ["data.at=stage"],
        ["stages=[{}, { frozen = true }, {}]"],
        ['optimizer.groups=[{ match = ["*.bias", "head.weight"], lr = 0.1 }]'],
    ],
    ids=str,
)
def test_a_module_goes_with_everything_else(job: JobFolder, overrides: list[str]) -> None:
    require_same_bits(cut(job, "language", *overrides, schedule="zero-bubble"))
