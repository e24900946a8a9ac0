"""The folder of a job's compiled code."""

from __future__ import annotations

from rpcmp.server.compile_cache import CompileCache


def test_a_job_has_one_folder_and_no_other_job_has_it() -> None:
    cache = CompileCache()
    first = cache.folder("one")
    (first / "code").touch()
    assert cache.folder("one") == first
    assert (first / "code").exists()
    second = cache.folder("two")
    assert second != first
    assert not first.exists()
    assert not list(second.iterdir())
    cache.clear()
    assert not second.exists()
    cache.clear()
    again = cache.folder("two")
    assert again.is_dir()
    cache.clear()
