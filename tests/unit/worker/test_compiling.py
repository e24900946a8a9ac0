"""Layers that are compiled, each by itself, in a folder that is found again."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rpcmp.config import loader
from rpcmp.process import compiler
from rpcmp.worker import compiling
from tests.support.forkedcall import in_a_fork
from tests.support.localgroup import require_same_bits
from tests.support.processes import JobFolder


class Branching(nn.Module):
    """A layer that cannot be compiled as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x


KEPT = (".so", ".gch")
"""What a later process finds: code, and headers that were compiled before."""

COMPILER = """#!/bin/sh
for word; do case "$word" in -mavx*|-mamx*) exit 1;; esac; done
echo "$@" >> {log}
for word; do case "$word" in *.gch) exec touch "$word";; esac; done
exec {compiler} "$@" -O0
"""


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a compiler that writes a line for each call, and its file of lines.

    It compiles no headers, optimizes nothing and knows no vectors: that takes 20 s.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    log, script = folder / "calls", folder / "g++"  # torch goes by its name
    log.touch()
    script.write_text(COMPILER.format(log=log, compiler=compiler))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, log


def compile_and_run() -> None:
    layer, value = nn.Tanh(), torch.ones(3, 4)  # one kernel
    assert torch.allclose(compiling.compiled(layer)(value), layer(value))


def require_that_the_next_finds_it(cxx: str, log: str, folder: str) -> None:
    os.environ["CXX"] = cxx
    compiler.prepare(folder)
    importlib.import_module("torch._inductor.compile_fx")  # once, for both
    if not (pid := os.fork()):
        try:
            compile_and_run()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    calls = Path(log).read_text().splitlines()
    compile_and_run()
    more = Path(log).read_text().splitlines()[len(calls) :]
    assert [word for call in more for word in call.split() if word.endswith(KEPT)] == []
    written = [Path(word) for call in calls for word in call.split() if word.endswith(KEPT)]
    assert {path.suffix for path in written} == {*KEPT}
    assert all(path.is_relative_to(folder) for path in written)


@pytest.mark.cluster
def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    counted, log = counting_compiler(tmp_path)
    folder = tmp_path / "compiled"
    folder.mkdir()
    in_a_fork(require_that_the_next_finds_it, str(counted), str(log), str(folder))


def require_limits_and_names() -> None:
    told = ""
    compiler.prepare()
    call = compiling.compiled(Branching())
    try:
        call(torch.ones(2))
    except Exception as error:
        told = str(compiling.explain("layer3", error))
    assert told.startswith("layer 'layer3' cannot be compiled: ")
    assert "`compile = false`" in told
    torch._dynamo.config.accumulated_recompile_limit = 4
    torch.compile = functools.partial(torch.compile, backend="eager")
    for _ in range(6):
        call = compiling.compiled(nn.Linear(2, 2))
        assert call(torch.ones(3, 2)).shape == (3, 2)
    for samples in range(1, 4):
        call(torch.ones(samples, 2))
    compiling.MAX_SHAPES = 2
    call = compiling.compiled(nn.Linear(2, 2))
    for samples in range(1, 5):
        try:
            call(torch.ones(samples, 2))
        except Exception as error:
            told = str(compiling.explain("head", error))
    assert told.startswith("layer 'head' had inputs of more than 2 shapes")


def test_each_layer_has_a_limit_of_its_own_and_is_named_if_it_cannot_be_compiled() -> None:
    in_a_fork(require_limits_and_names)


CHAIN = """
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

    def counted(*arguments: Any, **options: Any) -> Any:
        with Path(calls).open("a") as file:
            file.write("layer\n")
        return plain(*arguments, backend="aot_eager", **options)  # without C++

    torch.compile = counted
    os.environ[compiler.CACHE] = str(Path(calls).parent)
    # torch 2.11 with CUDA and no GPU: the first thread that compiles has to outlive all others.
    with FakeTensorMode():
        pass
    require_same_bits(loader.load_config(Path(config)))


def test_compiled_layers_have_the_bits_of_one_process(job: JobFolder) -> None:
    calls = job.folder / "calls"
    in_a_fork(require_bits, str(job.config(CHAIN)), str(calls))
    assert len(calls.read_text().splitlines()) == 2 * 4  # at the stages, and in one process


def test_errors_of_the_layer_itself_stay() -> None:
    error = ValueError("the user's own")
    assert compiling.explain("layer", error) is error
