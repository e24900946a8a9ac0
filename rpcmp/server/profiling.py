"""Measuring a job's layers on this host: a child as a worker is, for the length of one call."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from rpcmp.process.child import Child
from rpcmp.process.confinement import Reach
from rpcmp.process.environment import compute_environment
from rpcmp.process.forking import Forks
from rpcmp.server import codefolder
from rpcmp.v1 import control_pb2 as pb


async def profile(
    request: pb.ProfileRequest,
    forks: Forks,
    allowed: Sequence[str] | None,
    reach: Reach | None = None,
) -> str:
    """JSON of what was measured; the child ends where the caller goes away.

    Args:
        forks: where the child comes from.
        allowed: see StageServer.
        reach: what the child may open beyond the job's files; None: it is not confined.

    Raises:
        RpcmpError: what a layer failed with, or why the child ended.
    """
    with codefolder.unpacked(request.job.code) as folder:
        environment = compute_environment(request.job.threads)
        child = await Child.spawn(
            "rpcmp.profile", environment, forks=forks, reach=reach and reach.reading(folder)
        )
        answer = await child.ask(
            {
                "op": "profile",
                "order": request.order,
                "code_folder": str(folder or ""),
                "allowed": allowed,
                "sample": base64.b64encode(request.sample).decode(),
            }
        )
    return json.dumps(answer["profile"])
