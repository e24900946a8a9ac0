"""Temporary folders, and their removal; the memory of a control group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rpcmp.process import interpreter, resources
from tests.support.processes import no_more_files


def test_sweep_does_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (tmp_path / "rpcmp-code-x").symlink_to(kept)
    resources.sweep("rpcmp-code-")
    assert (kept / "file").exists()


def test_a_folder_is_removed_at_any_depth_and_with_any_permissions() -> None:
    folder = resources.create_folder("rpcmp-test-")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkdir("hidden", 0o000, dir_fd=here)
    os.symlink("/etc", "link", dir_fd=here)
    os.close(here)
    resources.remove_folder(folder)
    assert not folder.exists()
    assert Path("/etc/passwd").exists()


SECOND = {
    "proc/self/cgroup": "0::/user.slice/job\n",
    "cgroups/user.slice/job/memory.events": "low 0\nmax 7\noom 3\noom_kill 2\n",
    "cgroups/user.slice/job/memory.max": "max\n",
    "cgroups/user.slice/memory.max": "1048576\n",
}
FIRST = {
    "proc/self/cgroup": "4:memory:/docker/4711\n3:cpuset:/\n0::/\n",
    "cgroups/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "cgroups/memory/memory.limit_in_bytes": "1048576\n",
}
"""In a container, which sees its own group as the first one."""
NO_GROUP = {"proc/vmstat": "nr_free_pages 1234\noom_kill 2\n"}


@pytest.mark.parametrize("files", [SECOND, FIRST, NO_GROUP], ids=["second", "first", "none"])
def test_the_kernels_kills_for_memory_are_counted(files: dict[str, str], tmp_path: Path) -> None:
    places = {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroups"}
    machine = resources.memory_limit(**places)
    assert resources.memory_kills(**places) == 0
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert resources.memory_kills(**places) == 2
    assert resources.memory_limit(**places) == (machine if files is NO_GROUP else 1048576)


LEFT = {
    "proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:  3072 kB\nHugePages_Total:   0\n",
    "cgroups/user.slice/memory.current": "1000000\n",
    "cgroups/user.slice/memory.stat": "anon 5\ninactive_file 500000\nactive_file 7\n",
    "cgroups/memory/memory.usage_in_bytes": "1000000\n",
    "cgroups/memory/memory.stat": "inactive_file 500000\ntotal_inactive_file 500000\n",
}
"""One of a limit of 1 MiB is used, and half of that for files."""


@pytest.mark.parametrize("files", [SECOND, FIRST, NO_GROUP], ids=["second", "first", "none"])
def test_what_peers_may_send_is_what_is_left_of_the_groups_limit(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroups"}
    monkeypatch.setattr(resources, "MEMORY", 10_000_000)
    assert resources.free_memory(**places) == 9_000_000
    for name, text in (files | LEFT).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    left = 3072 * 1024 - 1_000_000 if files is NO_GROUP else 48_576 + 500_000 - 104_857
    assert resources.free_memory(**places) == left


def test_this_machine_says_how_much_memory_there_is() -> None:
    assert resources.memory_limit() > 2**28
    assert 0 < resources.free_memory() < resources.memory_limit()
    assert resources.memory_kills() >= 0


LEAVING = """
import multiprocessing, os, signal
from multiprocessing import util
from rpcmp.process import interpreter, resources
resources.name_leftovers()
lock = multiprocessing.get_context("spawn").Lock()
print(util.get_temp_dir(), lock._semlock.name, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_what_multiprocessing_leaves_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relies on the names that multiprocessing gives to its semaphores and its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", LEAVING]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        folder, name = process.stdout.readline().split()
        semaphore = Path("/dev/shm") / f"sem.{name.removeprefix('/')}"
        assert Path(folder).parent == tmp_path
        assert semaphore.exists()
        resources.sweep(resources.MULTIPROCESSING)
        assert Path(folder).exists()  # its process lives
        interpreter.kill_group(process.pid)
    assert not semaphore.exists()
    resources.sweep(resources.MULTIPROCESSING)
    assert not Path(folder).exists()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_without_a_free_descriptor(temporary: Path) -> None:
    folder = resources.create_folder("rpcmp-x-")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "file").touch()
    with no_more_files():
        resources.remove_folder(folder)
    assert not list(temporary.iterdir())


def test_what_cannot_be_looked_for_is_removed_later(temporary: Path) -> None:
    """A driver that may open no more files went down in the middle of a run: it killed a worker."""
    pid, other = 2**22 + 1, 2**22 + 2  # no process has them
    semaphore = Path("/dev/shm") / f"sem.{resources._semaphores(pid)}-test"
    semaphore.touch()
    (temporary / "rpcmp-x-left").mkdir()
    with no_more_files():
        resources.remove_semaphores(pid)
        resources.sweep("rpcmp-x-")
    assert semaphore.exists()
    assert list(temporary.iterdir())
    resources.remove_semaphores(other)
    resources.sweep("rpcmp-x-")
    assert not semaphore.exists()
    assert not list(temporary.iterdir())


def test_a_folder_that_cannot_be_locked_is_not_left(temporary: Path) -> None:
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        resources.create_folder("rpcmp-x-")
    assert not list(temporary.iterdir())


def test_a_folder_without_its_lock_yet_is_created_again_if_it_is_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed right after it has made its folder leaves nothing behind."""
    create, lock = tempfile.mkdtemp, resources._lock
    swept: list[str] = []

    def create_and_sweep(prefix: str) -> str:
        folder = create(prefix=prefix)
        if not swept:
            resources.sweep(prefix)
            swept.append(folder)
            assert not Path(folder).exists()
        return folder

    def sweep_and_lock(folder: Path) -> int:
        fd = lock(folder)
        if len(swept) == 1:  # after the folder was opened
            swept.append(str(folder))
            folder.rmdir()
        return fd

    monkeypatch.setattr(tempfile, "mkdtemp", create_and_sweep)
    monkeypatch.setattr(resources, "_lock", sweep_and_lock)
    folder = resources.create_folder("rpcmp-x-")
    assert len(swept) == 2
    assert list(temporary.iterdir()) == [folder]
    resources.sweep("rpcmp-x-")
    assert folder.exists()  # it is in use
    resources.remove_folder(folder)
