"""Layers that are compiled, each by itself, in a folder that is found again."""

from __future__ import annotations

import functools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.process import compiler
from rpcmp.worker import compiling
from tests.support.forkedcall import in_a_fork


class Branching(nn.Module):
    """A layer that cannot be compiled as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x


KEPT = (".so", ".gch")
"""What a later process finds: code, and headers that were compiled before."""


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a compiler that writes a line for each call, and its file of lines."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    log, script = folder / "calls", folder / "g++"  # torch goes by its name
    log.touch()
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {compiler} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, log


def compile_and_train(cxx: str, folder: str) -> None:
    os.environ["CXX"] = cxx
    compiler.prepare(folder)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    calls: list[Callable[..., Any]] = [compiling.compiled(layer) for layer in layers]
    for samples in (3, 2):
        value = torch.ones(samples, 4)
        plain = value
        for layer, call in zip(layers, calls, strict=True):
            value, plain = call(value), layer(plain)
        value.sum().backward()
        assert torch.allclose(value, plain)
    assert all(parameter.grad is not None for layer in layers for parameter in layer.parameters())


def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    counted, log = counting_compiler(tmp_path)
    folder = tmp_path / "compiled"
    folder.mkdir()
    in_a_fork(compile_and_train, str(counted), str(folder))
    calls = log.read_text().splitlines()
    assert calls
    in_a_fork(compile_and_train, str(counted), str(folder))
    more = log.read_text().splitlines()[len(calls) :]
    assert [word for call in more for word in call.split() if word.endswith(KEPT)] == []
    written = [Path(word) for call in calls for word in call.split() if word.endswith(KEPT)]
    assert written
    assert all(path.is_relative_to(folder) for path in written)


def require_many_layers() -> None:
    torch._dynamo.config.accumulated_recompile_limit = 4
    plain = torch.compile
    torch.compile = functools.partial(plain, backend="eager")
    for _ in range(6):
        call = compiling.compiled(nn.Linear(2, 2))
        assert call(torch.ones(3, 2)).shape == (3, 2)
    for samples in range(1, 4):
        call(torch.ones(samples, 2))
    torch.compile = functools.partial(plain, backend="eager")
    compiling.MAX_SHAPES = 2
    call = compiling.compiled(nn.Linear(2, 2))
    told = ""
    for samples in range(1, 5):
        try:
            call(torch.ones(samples, 2))
        except Exception as error:
            told = str(compiling.explain("head", error))
    assert told.startswith("layer 'head' had inputs of more than 2 shapes")


def test_each_layer_has_a_limit_of_its_own() -> None:
    in_a_fork(require_many_layers)


def require_named_break() -> None:
    compiler.prepare()
    call = compiling.compiled(Branching())
    try:
        call(torch.ones(2))
    except Exception as error:
        told = str(compiling.explain("layer3", error))
    assert told.startswith("layer 'layer3' cannot be compiled: ")
    assert "`compile = false`" in told


def test_a_layer_that_cannot_be_compiled_is_named() -> None:
    in_a_fork(require_named_break)


def test_errors_of_the_layer_itself_stay() -> None:
    error = ValueError("the user's own")
    assert compiling.explain("layer", error) is error
