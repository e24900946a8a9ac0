"""`pytest -m gpu` without a GPU: on the pretend accelerator, and on none."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import pretend
from tests.support.docs import PAGES, blocks, commands
from tests.support.places import ROOT

WHEELS = """
annotated_types anyio cffi click cryptography execnet google grpc grpc_health h11 hypothesis idna
iniconfig markdown_it mdurl numpy packaging pluggy prometheus_client psutil py pycparser pydantic
pydantic_core pygments pytest pytest_timeout rich safetensors setproctitle sortedcontainers
starlette typing_inspection uvicorn xdist

torch filelock fsspec functorch jinja2 markupsafe mpmath networkx setuptools sympy torchgen triton
typing_extensions pretend_accelerator pretend_kernels pretend_memory pretend_streams
"""
"""Modules of pip's that the tier may import: those of CONTRIBUTING, of torch, and the device."""

ONLY_THOSE = f"""
import importlib.machinery, sys
ALLOWED = {WHEELS.split()!r}

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        place = "" if found is None or path is not None else str(found.origin)
        if "site-packages" in place and not name.startswith("_") and name not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {{name!r}} on such a machine", name=name)
        return found

sys.meta_path[:] = [Finder if x is importlib.machinery.PathFinder else x for x in sys.meta_path]
"""


def without_a_registry(folder: Path) -> None:
    """Let the processes with a folder on PYTHONPATH import no module of pip's but WHEELS."""
    (folder / "sitecustomize.py").write_text(ONLY_THOSE, encoding="utf-8")


def tier(environment: Mapping[str, str]) -> str:
    """Run the tier and return its output."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n0", "-q"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("devices", ["1", "4"])
def test_the_tier_of_accelerators_passes_on_a_pretend_one(tmp_path: Path, devices: str) -> None:
    environment = pretend.install(tmp_path)
    without_a_registry(tmp_path)
    last = tier({**environment, "PRETEND_DEVICES": devices}).splitlines()[-1]
    assert re.fullmatch(r"\d\d passed in .*", last), last


TINY = (
    *("--batch", "4", "--splits", "2,4", "--runs", "2", "--steps", "1"),
    *("--set", "model.kwargs={ classes = 10 }"),
    *("--set", "data.train.kwargs={ samples = 12, classes = 10, size = 32 }"),
)


@pytest.mark.parametrize("devices", ["1", "4"])
def test_the_classic_table_is_printed_and_drawn_on_a_pretend_one(
    tmp_path: Path, devices: str
) -> None:
    plot = tmp_path / "gpu.svg"
    (command,) = [
        line
        for line in commands(blocks("sh", PAGES["tests/benchmarks/README.md"]))
        if line.startswith("python -m tests.benchmarks.gpu")
    ]
    _, *words = shlex.split(command.replace("gpu.svg", str(plot)))
    environment = {**os.environ, **pretend.install(tmp_path), "PRETEND_DEVICES": devices}
    done = subprocess.run(
        [sys.executable, *words, *TINY], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    peers = [["torch pipelining", "2", "2"]] if devices == "4" else []
    assert [row[:3] for row in rows[2:]] == [
        ["one device", "4", "2"],
        ["naive split", "4", "2"],
        ["rpcmp", "2", "2"],
        ["rpcmp", "4", "2"],
        *peers,
    ]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[3:])
    assert any(line.startswith("best of rpcmp: ") for line in lines)
    without = [line for line in lines if line.startswith("without ")]
    if devices == "1":
        named = "without torch pipelining and DataParallel, which need two devices: here is one"
        assert without == [named]
    else:  # one micro-batch for two ranks, and torch's own, for CUDA
        assert [line.partition(":")[0] for line in without] == [
            "without torch pipelining, 4 samples at once",
            "without DataParallel, 2 samples at once",
        ]
    assert "do not train the same" not in done.stdout
    assert "<svg" in plot.read_text()


def test_what_the_table_has_no_time_for_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--minutes", "0", *TINY]
    environment = {**os.environ, **pretend.install(tmp_path), "PRETEND_DEVICES": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" at once: 0 minutes are over") == 4


def test_without_an_accelerator_the_tier_is_skipped_and_says_why() -> None:
    out = tier({"CUDA_VISIBLE_DEVICES": ""})
    assert "torch finds no accelerator on this machine" in out
    assert re.fullmatch(r"\d\d skipped in .*", out.splitlines()[-1]), out
