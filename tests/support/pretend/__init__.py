"""Jobs on the pretend accelerator: fork servers and stage servers that have it.

torch loads it by an entry point from a folder on PYTHONPATH, so no process needs to import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import pool, processes
from tests.support.processes import rpcmp
from tests.support.reaper import TOKEN
from tests.support.sharedforks import DRIVE, SharedByAll

HERE = Path(__file__).parent

IN_ONE_PROCESS = ("tests.support.localpipeline",)
"""What forks import that have all stages of a job."""

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


def install(folder: Path, kept: Path | None = None) -> dict[str, str]:
    """Install it in `folder`; return the environment that gives it to torch.

    Args:
        kept: where it is built once for all processes of a run; None: in `folder`, anew.
    """
    kept = (kept or folder) / "pretend"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:  # of all processes of a run, the first one builds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "guard.so").exists():
            _build(kept / "guard.so")
    for path in (kept / "guard.so", *(HERE / name for name in MODULES)):
        shutil.copy(path, folder)
    described = folder / "pretend_accelerator-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend-accelerator\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def _build(library_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    torch_folder = Path(str(spec.origin)).parent
    library = torch_folder / "lib"
    source, built = str(HERE / "guard.cpp"), str(library_path)
    options = ["-std=c++20", "-shared", "-fPIC", "-I", str(torch_folder / "include")]
    links = ["-L", str(library), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *options, source, "-o", built, *links], check=True)


class Pretended:
    """Fork servers and stage servers whose processes have a pretend accelerator.

    Args:
        installed: the environment that gives it to torch.
        more: further variables of their environment.
    """

    def __init__(self, installed: dict[str, str], **more: str) -> None:
        # Devices of its own: jobs of tests that run beside this one do not take them.
        own = {**installed, "PRETEND_HOST": uuid.uuid4().hex}
        self.installed = installed
        self._forks = SharedByAll(TOKEN, {**own, **more})
        self._forks.imports += IN_ONE_PROCESS
        self._servers = pool.ServerPool()

    def start(self) -> None:
        """Start the first fork server now."""
        self._forks.line_of(DRIVE).close()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the jobs and the forks of this process be theirs, in this block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "FORKS", self._forks)
            patch.setattr(pool, "POOL", self._servers)
            yield

    def close(self) -> None:
        self._servers.close()
        self._forks.close()


@contextlib.contextmanager
def pretended() -> Iterator[Pretended]:
    """Install the accelerator and start its first fork server, for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        found = Pretended(install(Path(folder), Path(os.environ["XDG_CACHE_HOME"])))
        try:
            found.start()
            yield found
        finally:
            found.close()


@contextlib.contextmanager
def pretending(first: Pretended, **more: str) -> Iterator[None]:
    """Let the jobs of this process run in processes with more variables, in this block."""
    other = Pretended(first.installed, **more)
    try:
        with other.in_use():
            yield
    finally:
        other.close()


def on(*devices: str) -> str:
    """Return the [[stages]] tables that put each stage on its device."""
    return "\n".join(f'[[stages]]\ndevice = "{device}"' for device in devices)


def placed(text: str, *devices: str) -> str:
    """Return a job's text with a device in each of its [[stages]] tables."""
    head, *tables = text.split("[[stages]]")
    pairs = zip(devices, tables, strict=True)
    return head + "".join(f'[[stages]]\ndevice = "{device}"{table}' for device, table in pairs)


def proved(config: Path, *overrides: str) -> str:
    """Return what `verify` prints, once it has proved the bits of one process on the CPU."""
    options = [part for each in overrides for part in ("--set", each)]
    result = rpcmp("verify", config, "--steps", "2", *options)
    assert result.code == 0, result.out + result.err
    assert "bit for bit" in result.out
    return result.out
