"""The real contestants of `rpcmp bench`."""

from __future__ import annotations

import asyncio

import pytest

from rpcmp.errors import ConfigError
from rpcmp.tools.bench import cases
from rpcmp.tools.bench.contestants import stage_times
from tests.support.processes import JobFolder


def test_an_error_in_a_peer_names_its_place(job: JobFolder) -> None:
    case = cases.load(str(job.config('[model]\nlayers = "zoo:broken_layers"\n')))
    with pytest.raises(ConfigError, match="this factory is broken"):
        asyncio.run(stage_times(case))
