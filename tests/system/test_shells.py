"""Shells that are not on every machine accept the output of `rpcmp completion`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.needs import needs


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_each_shell_loads_its_completion_script(shell: str) -> None:
    program = needs(shell)
    command = [sys.executable, "-m", "rpcmp", "completion", shell]
    script = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"_RPCMP_COMPLETE={shell}_complete" in script
    checked = subprocess.run(
        [program, "-n"], input=script, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    broken = subprocess.run(
        [program, "-n"], input=f"{script}\nif (", capture_output=True, text=True, timeout=60
    )
    assert broken.returncode != 0, "it understands anything"
