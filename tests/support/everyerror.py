"""An example of every error class."""

from __future__ import annotations

import math
import signal

from rpcmp import errors
from rpcmp.errors import RpcmpError

TEXT = "Zürich → 東京 \N{SNOWMAN}\nsecond line\t\x00"

EXAMPLES: list[RpcmpError] = [
    errors.StageError(
        stage="stage1",
        phase="forward",
        cause=f"ValueError: {TEXT}",
        traceback=f'File "mödel.py", line 3\n{TEXT}',
        step=3,
        microbatch=0,
        received="from 'stage0': float32[8, 10]",
    ),
    errors.StageError("stage0", "build", "OSError"),
    errors.StageConfigError("stage0", "build", TEXT, TEXT),
    errors.DeviceLostError("stage1", "backward", TEXT, TEXT, step=3, microbatch=2),
    errors.NonFiniteLossError(math.inf, step=4, microbatch=2),
    errors.LossScaleError(2**-20, step=90),
    errors.WorkerHungError("stage1", "host-b", 4711, "forward", 3, 0, 6.5, f"State: T\n{TEXT}"),
    errors.InterruptedJobError(signal.SIGTERM, step=9),
    *(
        kind(TEXT)
        for kind in (
            errors.RpcmpError,
            errors.ConfigError,
            errors.KeyConfigError,
            errors.AddressInUseError,
            errors.CheckpointConflictError,
            errors.FactoryError,
            errors.VersionError,
            errors.CheckpointError,
            errors.UnavailableError,
            errors.UnreachableError,
            errors.BusyError,
            errors.TakenOverError,
            errors.DrainingError,
            errors.RecoveryTimeoutError,
            errors.RelayError,
            errors.SecurityError,
            errors.JobError,
            errors.WorkerDiedError,
            errors.MismatchError,
            errors.SavingError,
            errors.UnsupportedJobError,
        )
    ),
]


def tree(kind: type[RpcmpError]) -> set[type[RpcmpError]]:
    """Return `kind` and all its subclasses."""
    return {kind}.union(*(tree(child) for child in kind.__subclasses__()))
