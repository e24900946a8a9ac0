"""What stages do on an accelerator, with the bits of the CPU: the matrix of devices.

The accelerator is a pretended one, `pretend:0` to `pretend:3`: see tests/support/pretend.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pretend import pretending
from tests.support.processes import JobFolder, rpcmp


@pytest.fixture(scope="module", autouse=True)
def _devices() -> Iterator[None]:
    with pretending():
        yield


def proved(config: Path) -> str:
    """Return what `verify` prints, once it has proved the bits of one process on the CPU."""
    result = rpcmp("verify", config, "--steps", "2")
    assert result.code == 0, result.out + result.err
    assert "bit for bit" in result.out
    return result.out


@pytest.mark.parametrize("first", ["cpu", "pretend:0"])
def test_chain(job: JobFolder, first: str) -> None:
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        [[stages]]
        device = "{first}"
        [[stages]]
        device = "pretend:1"
    """)
    assert "device is pretend:1 at stage 'stage1' and cpu in the reference" in proved(config)
