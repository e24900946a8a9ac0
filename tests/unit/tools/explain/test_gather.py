"""The files that `rpcmp explain` lists."""

from __future__ import annotations

from rpcmp.tools.explain.gather import job_files
from tests.support.graphs import chain_of
from tests.support.processes import JobFolder


def test_the_listed_files_are_read_and_written_by_the_run(job: JobFolder) -> None:
    (job.folder / "notes.txt").write_text("not code")
    config = chain_of(2, checkpoint={"dir": "kept", "every_steps": 5}).with_folder(job.folder)
    code, run, checkpoints = job_files(config)
    assert (run.what, run.path) == ("run folder", str(job.folder / "runs"))
    sources = list(job.folder.rglob("*.py"))
    size = sum(len(path.read_bytes()) for path in sources)
    assert code.text == (f"{len(sources)} Python files ({size:,} bytes), sent to each stage server")
    assert checkpoints.path == str(job.folder / "kept")
    assert checkpoints.text.startswith("every 5 steps and at the end, 3 kept; each stage's file")
    assert not checkpoints.is_in_the_way
    (job.folder / "kept" / "step-00000003").mkdir(parents=True)
    (job.folder / "kept" / "step-00000003" / "manifest.json").write_text("{}")
    assert not job_files(config)[-1].is_in_the_way  # it is damaged, so a new run ignores it
    nothing = {"ship_code": False, "recovery": {"enabled": False}, "log": {"folder": ""}}
    (only,) = job_files(chain_of(2, **nothing))
    assert only.text == "none: recovery is off"
