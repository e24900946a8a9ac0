"""Compiled layers end to end: the bits of one process, and hosts that cannot compile."""

from __future__ import annotations

import pytest

from tests.support.faults import drive
from tests.support.processes import JobFolder, rpcmp

# One shape only: a compiler takes seconds for each.
CHAIN = """
steps = 2
num_microbatches = 2
schedule = "zero-bubble"
compile = true
[model]
layers = "zoo:mlp"
kwargs = { blocks = 1 }
balance = [1, 1]
[[stages]]
recompute = true
[[stages]]
[data]
train = { callable = "zoo:regression", kwargs = { samples = 16 } }
batch_size = 8
"""


@pytest.mark.cluster  # tests/unit/worker/test_compiling.py: in one process
def test_compiled_layers_have_the_bits_of_one_process_that_compiles_them(job: JobFolder) -> None:
    proved = rpcmp("verify", job.config(CHAIN), "--steps", "2")
    assert "identical: 2 losses" in proved.out, proved.err


@pytest.mark.cluster
def test_a_host_without_a_compiler_ends_the_job_before_a_step(job: JobFolder) -> None:
    result = drive(job.config(CHAIN), under=("env", "CXX=no-such-compiler"))
    assert result.code == 2
    assert "`compile` needs a C++ compiler on" in " ".join(result.err.split())
    assert "step" not in {event["event"] for event in result.events}
