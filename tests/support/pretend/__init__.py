"""Jobs on the pretend accelerator: fork servers and stage servers that have it.

torch loads it by an entry point from a folder on PYTHONPATH, so no process needs to import it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import pool, processes
from tests.support.processes import rpcmp
from tests.support.reaper import TOKEN
from tests.support.sharedforks import SharedByAll

HERE = Path(__file__).parent

MODULES = (
    "pretend_accelerator.py",
    "pretend_kernels.py",
    "pretend_memory.py",
    "pretend_streams.py",
)

ENTRY_POINTS = """
[torch.backends]
pretend = pretend_accelerator:register
pretend_memory = pretend_memory:register
"""


def install(folder: Path) -> dict[str, str]:
    """Build it into `folder`; return the environment that gives it to torch."""
    torch_folder = Path(torch.__file__).parent
    library = torch_folder / "lib"
    source, built = str(HERE / "guard.cpp"), str(folder / "guard.so")
    options = ["-std=c++20", "-shared", "-fPIC", "-I", str(torch_folder / "include")]
    links = ["-L", str(library), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *options, source, "-o", built, *links], check=True)
    for name in MODULES:
        shutil.copy(HERE / name, folder)
    described = folder / "pretend_accelerator-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend-accelerator\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


@contextlib.contextmanager
def pretending(**more: str) -> Iterator[None]:
    """Let the jobs of this process run where there is a pretend accelerator, in this block.

    Args:
        more: further variables of their environment.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # Devices of its own: jobs of tests that run beside this one do not take them.
        own = {**install(Path(folder)), "PRETEND_HOST": uuid.uuid4().hex}
        forks = SharedByAll(TOKEN, {**own, **more})
        servers = pool.ServerPool()
        patch.setattr(processes, "FORKS", forks)
        patch.setattr(pool, "POOL", servers)
        try:
            yield
        finally:
            servers.close()
            forks.close()


def on(*devices: str) -> str:
    """Return the [[stages]] tables that put each stage on its device."""
    return "\n".join(f'[[stages]]\ndevice = "{device}"' for device in devices)


def proved(config: Path, *overrides: str) -> str:
    """Return what `verify` prints, once it has proved the bits of one process on the CPU."""
    options = [part for each in overrides for part in ("--set", each)]
    result = rpcmp("verify", config, "--steps", "2", *options)
    assert result.code == 0, result.out + result.err
    assert "bit for bit" in result.out
    return result.out
