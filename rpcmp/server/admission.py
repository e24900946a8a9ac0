"""Which jobs a stage server takes, and which files and modules they may use there.

What it does not take is refused before anything of the job has started. What a job's worker may
open later is a matter of its sandbox: see `rpcmp.process.sandbox.confinement`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpcmp.checkpoint.files import place_of
from rpcmp.errors import CheckpointError, ConfigError, VersionError
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.server.connection import differences, versions
from rpcmp.server.snapshot_store import NO_FOLDER, FolderOrReason
from rpcmp.v1 import control_pb2 as pb


@dataclass(frozen=True)
class Admission:
    """What a server was started with.

    Attributes:
        stage_index, replica: the stage that it serves; None: any, as a spare.
        accepts_code: whether jobs may bring Python files along, if there is no list.
        allowed: modules that jobs' callables may come from, besides what every allow list has;
            None: there is no list.
        checkpoints: the folder that jobs' checkpoints may lie in, without links: those on the way
            to it are its owner's, and were followed once.
        file_access: files that workers may open beyond a job's own; None: they are not confined.
        versions: of the software on this host.
    """

    stage_index: int | None
    replica: int = 0
    accepts_code: bool = True
    allowed: Sequence[str] | None = None
    checkpoints: Path = field(default_factory=lambda: Path("checkpoints").resolve())
    file_access: FileAccess | None = None
    versions: pb.Versions = field(default_factory=versions)

    def require(self, request: pb.PrepareRequest, has_init: bool) -> None:
        """Refuse a job that this server cannot serve, or must not.

        Args:
            has_init: whether the job's `init` is a file of this host; if not, it is sent.

        Raises:
            ConfigError: it is for another stage, or needs what this server does not let it use.
            VersionError: its driver has other software.
        """
        own = self.stage_index, self.replica
        if self.stage_index is not None and own != (request.stage_index, request.replica):
            raise ConfigError(
                f"serves stage {self.stage_index} replica {self.replica}, not stage "
                f"{request.stage_index} replica {request.replica}; check `addresses`"
            )
        if different := differences(self.versions, request.versions):
            raise VersionError(f"other software than the driver's: {'; '.join(different)}")
        # Code could take any name of the list.
        if request.code and not (self.accepts_code and self.allowed is None):
            option = "--allow" if self.allowed else "--no-code"
            raise ConfigError(
                f"was started with {option} and refuses {len(request.code)} Python files; "
                "install the model's package on the host and set ship_code = false"
            )
        for path in [*request.data_paths, *([request.init] if has_init else [])]:
            if self.file_access is not None and not self.file_access.may_read(path):
                raise ConfigError(
                    f"does not let jobs read {path}, which is one of `data.paths` or `init`: start "
                    f"it with --data {path}, or a folder above"
                )

    def checkpoint_folder(self, request: pb.PrepareRequest) -> FolderOrReason:
        """Return the folder of a job's checkpoints on this host, or why there is none.

        Raises:
            ConfigError: it may not lie where the job wants it, and the job cannot do without.
        """
        if not request.checkpoint_folder:
            return NO_FOLDER
        # What a run leaves that has to give up is welcome anywhere below.
        parents = [self.checkpoints] if request.may_keep_nothing else []
        folder, relative = request.checkpoint_folder, request.relative_checkpoint_folder
        try:
            return place_of(self.checkpoints, folder, relative, parents)
        except CheckpointError as error:
            text = (
                f"checkpoints cannot lie on {platform.node()}: {error}: start `rpcmp serve` there "
                "with --checkpoints, or set [checkpoint] dir"
            )
            if request.may_keep_nothing:
                return text
            raise ConfigError(text) from error
