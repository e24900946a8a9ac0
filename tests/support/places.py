"""Paths of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rpcmp"
EXAMPLES = PACKAGE / "examples"
DEPLOY = ROOT / "deploy"
TESTS = ROOT / "tests"
ZOO = TESTS / "zoo"
