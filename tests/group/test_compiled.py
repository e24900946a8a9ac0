"""Compiled layers: the bits of one process that compiles them, here without a C++ compiler."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rpcmp.config import loader
from rpcmp.process import compiler
from tests.support.forkedcall import in_a_fork
from tests.support.localgroup import require_same_bits
from tests.support.processes import JobFolder

TEXT = """
num_microbatches = 2
schedule = "zero-bubble"
compile = true
[model]
layers = "zoo:mlp"
balance = [1, 3]
[[stages]]
recompute = true
[[stages]]
"""


def require_bits(config: str, calls: str) -> None:
    plain = torch.compile

    def counted(*arguments: object, **options: object) -> object:
        with Path(calls).open("a") as file:
            file.write("layer\n")
        return plain(*arguments, backend="aot_eager", **options)  # type: ignore[call-overload]

    torch.compile = counted  # type: ignore[assignment]
    os.environ[compiler.CACHE] = str(Path(calls).parent)
    require_same_bits(loader.load_config(Path(config)))


def test_compiled_layers_have_the_bits_of_one_process(job: JobFolder) -> None:
    calls = job.folder / "calls"
    in_a_fork(require_bits, str(job.config(TEXT)), str(calls))
    assert len(calls.read_text().splitlines()) == 2 * 4  # at the stages, and in one process
