"""Operations that a host without code runs: none crashes, and models need no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rpcmp.splitting.program import require_bounded
from rpcmp.splitting.split import split_module
from tests.benchmarks.anymodel import sample
from tests.support.places import ROOT
from tests.zoo import architectures

SHORT = ("llama", "mixture", "mamba", "unet")
"""They have nearly all operations that any of them has."""


@pytest.mark.parametrize(
    "calls",
    [pytest.param(20, marks=pytest.mark.cluster), pytest.param(400, marks=pytest.mark.long)],
)
def test_no_operation_crashes_on_hostile_arguments(calls: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tool = (sys.executable, "-m", "tests.support.hostilecalls", "1", str(calls), str(log))
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, f"{log.read_text()[:1000]}\n{done.stderr[-1000:]}"
    found = json.loads(done.stdout)
    assert found["operations"] > 800
    assert len(found["never"]) < found["operations"] / 4, "most calls do not reach a kernel"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.cluster if name in SHORT else pytest.mark.long)
        for name in architectures.ARCHITECTURES
    ],
)
def test_models_need_no_others(name: str) -> None:
    split = split_module(architectures.module(name), sample(name, 5))
    for layer in split.layers:
        require_bounded(layer.training)
        require_bounded(layer.evaluation)
