"""A client that claims a worker of a stage server, without a job."""

from __future__ import annotations

import uuid
from typing import Any

from rpcmp.server.connection import versions
from rpcmp.v1 import control_pb2 as pb
from tests.support.processes import Addressed


def prepared(server: Addressed, folder: str, **more: Any) -> pb.PrepareRequest:
    return pb.PrepareRequest(
        job="evil",
        job_id=uuid.uuid4().hex,
        generation=1,
        versions=versions(),
        threads=1,  # as in the environment of the fork server
        heartbeat_timeout=120,
        group=[pb.GroupStage(name="stage0", replicas=1)],
        checkpoint_folder=folder,
        **more,
    )
