"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

from rpcmp import configdoc, configfile
from tests.processes import rpcmp

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(language: str, starts_with: str) -> str:
    """The README's code block of that language and first line."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(text for text in blocks if text.startswith(starts_with))


def test_the_table_of_keys_is_that_of_the_models() -> None:
    assert configdoc.table() in README, "run `python -m rpcmp.configdoc` and paste its table"


def test_the_model_and_config_run_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(block("python", "# my_model.py"))
    (tmp_path / "config.toml").write_text(block("toml", "# config.toml"))
    result = rpcmp("verify", tmp_path / "config.toml", "--steps", "3")
    assert result.code == 0, result.err
    overrides = re.findall(r"--set ('.*?'|\S+)", block("sh", "rpcmp drive config.toml   "))
    assert len(overrides) == 2
    options = [override.strip("'") for override in overrides]
    assert configfile.load(tmp_path / "config.toml", options).num_stages == 3
