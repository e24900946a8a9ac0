"""What a server keeps of a job on its disk from one generation to the next.

    compiled/                     what its workers compile; torch unpickles and runs what lies here
    weights/model.safetensors     its stage's part of `init`, if the driver has sent it
            config.json           of the model, if that is a folder that has one

No job gets the folder of another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from rpcmp.checkpoint.files import Inside
from rpcmp.errors import ConfigError
from rpcmp.process import resources
from rpcmp.server.snapshot_transfer import receive_file
from rpcmp.v1 import control_pb2 as pb

PREFIX = "rpcmp-job-"


@dataclass
class JobFiles:
    """The folder of a job.

    Attributes:
        weights_key: identifies the weights that lie here; empty: none do.
    """

    folder: Path
    weights_key: str = ""

    @property
    def compiled(self) -> Path:
        return self.folder / "compiled"

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    async def receive_weights(self, file: pb.CheckpointFile, data: AsyncIterator[bytes]) -> None:
        """Write one of the files that the driver sends; an empty one is removed.

        The caller sets `weights_key` with the last one.
        """
        from rpcmp.pipelining.weight_files import CONFIG, SINGLE  # pydantic

        if file.path not in (SINGLE, CONFIG):
            raise ConfigError(f"{file.path!r} is no file of weights")
        self.weights_key = ""
        place = Inside(self.weights, (file.path,), PurePath(self.weights / file.path))
        await receive_file(data, place, file.size)
        if not file.size:
            place.real.unlink()


class JobFolder:
    """The folder of one job at a time."""

    def __init__(self) -> None:
        self._job_id = ""
        self._files: JobFiles | None = None

    def open(self, job_id: str) -> JobFiles:
        """Return the job's folder, which is empty if the job is a new one."""
        if self._files is None or job_id != self._job_id:
            self.clear()
            files = JobFiles(resources.create_folder(PREFIX))
            for folder in (files.compiled, files.weights):
                folder.mkdir(mode=0o700)
            self._files, self._job_id = files, job_id
        return self._files

    def clear(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            resources.remove_folder(files.folder)
