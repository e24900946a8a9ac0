"""Jobs that train in this process alone: what a run's steps and parameters have to be."""

from __future__ import annotations

import sys
from pathlib import Path

from rpcmp.config.loader import load_config
from rpcmp.rpc.tensors import parameters_sha256
from tests.support.faults import Committed
from tests.support.localgroup import unsplit
from tests.support.processes import own_modules


def committed_alone(path: Path, *settings: str) -> Committed:
    """Train a job whose modules are beside its config; see `tests.support.faults.committed`."""
    with own_modules():
        sys.path.insert(0, str(path.parent))
        run = unsplit(load_config(path, settings))
    steps = [(number, loss.hex()) for number, loss in enumerate(run.losses, 1)]
    return steps, parameters_sha256(run.state)
