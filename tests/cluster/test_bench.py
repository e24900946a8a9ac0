"""The real contestants of `rpcmp bench`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from rpcmp.errors import ConfigError
from rpcmp.tools.bench import cases
from rpcmp.tools.bench.contestants import stage_times
from rpcmp.tools.bench.cpu_usage import TICK_SECONDS, CpuMeter
from tests.support.processes import JobFolder

BURNING = """
import os, sys, time
def burn():
    while time.process_time() < 0.1:
        pass
ended = os.fork()
burn()
if not ended:
    os._exit(0)
os.waitpid(ended, 0)
living = os.fork()
if not living:
    burn()
    print(os.getpid(), flush=True)
sys.stdin.read()
"""
"""Three processes that take 0.1 s of CPU time each; one of them ends, the last tells its pid."""


def test_the_cpu_time_of_all_that_a_process_has_started_counts() -> None:
    meter = CpuMeter()
    start = meter.read([os.getpid()])
    command = [sys.executable, "-c", BURNING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        living = int(root.stdout.readline())
        everything, without = meter.read([root.pid]), meter.read([root.pid], [living])
        here, others = meter.read([os.getpid()]), meter.read([os.getpid()], [root.pid])
        root.stdin.close()
    exactly = 0.3 - 2 * TICK_SECONDS  # of what has ended, in user and system mode
    assert everything >= exactly
    assert exactly - 0.1 <= without <= everything - 0.1
    assert here - start >= exactly
    assert others <= here - exactly


@pytest.mark.cluster
def test_an_error_in_a_peer_names_its_place(job: JobFolder) -> None:
    case = cases.load(str(job.config('[model]\nlayers = "zoo:broken_layers"\n')))
    with pytest.raises(ConfigError, match="this factory is broken"):
        asyncio.run(stage_times(case))
