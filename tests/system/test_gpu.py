"""`pytest -m gpu` without a GPU: on the pretend accelerator, and on none."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import pretend
from tests.support.docs import PAGES, blocks, commands
from tests.support.places import ROOT


def tier(environment: Mapping[str, str]) -> str:
    """Run the tier and return its output."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n0", "-q"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tier_of_accelerators_passes_on_a_pretend_one(tmp_path: Path) -> None:
    last = tier(pretend.install(tmp_path)).splitlines()[-1]
    assert re.fullmatch(r"\d\d passed in .*", last), last


TINY = (
    *("--batch", "4", "--splits", "2,4", "--runs", "2", "--steps", "1"),
    *("--set", "model.kwargs={ classes = 10 }"),
    *("--set", "data.train.kwargs={ samples = 12, classes = 10, size = 32 }"),
)


def test_the_classic_table_is_printed_and_drawn_on_a_pretend_one(tmp_path: Path) -> None:
    plot = tmp_path / "gpu.svg"
    (command,) = [
        line
        for line in commands(blocks("sh", PAGES["tests/benchmarks/README.md"]))
        if line.startswith("python -m tests.benchmarks.gpu")
    ]
    _, *words = shlex.split(command.replace("gpu.svg", str(plot)))
    environment = {**os.environ, **pretend.install(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words, *TINY], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert [row[:2] for row in rows[2:]] == [
        ["one device", "4"],
        ["naive split", "4"],
        ["rpcmp", "2"],
        ["rpcmp", "4"],
        ["torch pipelining", "2"],
    ]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[2:])
    assert any(line.startswith("best of rpcmp: ") for line in lines)
    assert (
        "without torch pipelining, 4 samples at once: " in done.stdout
    )  # one micro-batch, 2 ranks
    assert "without DataParallel, 2 samples at once: " in done.stdout  # torch's own, for CUDA
    assert "do not train the same" not in done.stdout
    assert "<svg" in plot.read_text()


def test_without_an_accelerator_the_tier_is_skipped_and_says_why() -> None:
    out = tier({"CUDA_VISIBLE_DEVICES": ""})
    assert "torch finds no accelerator on this machine" in out
    assert re.fullmatch(r"\d\d skipped in .*", out.splitlines()[-1]), out
