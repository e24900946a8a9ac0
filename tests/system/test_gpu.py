"""`pytest -m gpu` without a GPU: on the pretend accelerator, and on none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import pretend
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


def test_without_an_accelerator_the_tier_is_skipped_and_says_why() -> None:
    out = tier({"CUDA_VISIBLE_DEVICES": ""})
    assert "torch finds no accelerator on this machine" in out
    assert re.fullmatch(r"\d\d skipped in .*", out.splitlines()[-1]), out
