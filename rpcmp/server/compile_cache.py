"""The folder with what a job's workers compile, which the next generation's worker finds again.

torch unpickles and runs what lies there, so no job gets the folder of another.
"""

from __future__ import annotations

from pathlib import Path

from rpcmp.process import resources
from rpcmp.process.compiler import COMPILED


class CompileCache:
    """The folder of one job at a time."""

    def __init__(self) -> None:
        self._job_id = ""
        self._folder: Path | None = None

    def folder(self, job_id: str) -> Path:
        """Return the job's folder, which is empty if the job is a new one."""
        if self._folder is None or job_id != self._job_id:
            self.clear()
            self._folder, self._job_id = resources.create_folder(COMPILED), job_id
        return self._folder

    def clear(self) -> None:
        if self._folder is not None:
            resources.remove_folder(self._folder)
            self._folder = None
