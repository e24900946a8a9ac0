"""Send a stage its part of `init`, if its host has no copy.

    Prepare ──> does this host have `init`, or a part of it that this job was sent before?
    the driver process ──names──> this process, which alone opens the files
    Put ──> config.json, if there is one; the tensors of the stage's layers, as one safetensors file
    Start ──> the worker reads these files, in this generation and in those that follow

The driver process runs the user's code. So it names tensors and no paths or offsets: it cannot make
this process, which may open more, send anything else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rpcmp.checkpoint.weight_excerpt import Excerpt
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError
from rpcmp.pipelining.weight_files import CONFIG, SINGLE, WeightFiles
from rpcmp.server.client import StageClient
from rpcmp.server.connection import machine
from rpcmp.v1 import control_pb2 as pb

TELL_SECONDS = 5.0
"""Between two lines about a transfer."""


class WeightTransfer:
    """Sends parts of one `init` to the servers of a generation.

    Args:
        init: the absolute path; empty: the job has none.
        say: called with a stage's label and a line about it.
    """

    def __init__(
        self, init: str, job_id: str, generation: int, say: Callable[[str, str], None]
    ) -> None:
        self._init, self._say = init, say
        self._job_id, self._generation = job_id, generation

    async def send(
        self, client: StageClient, claim: pb.PrepareResponse, names: Sequence[str] | None
    ) -> bool:
        """Send what a server lacks; returns whether its worker has to read what was sent.

        Args:
            names: of the stage's tensors, in the files; None if they are not known here.

        Raises:
            ConfigError: the files are neither there nor here, or cannot be read.
        """
        if not self._init or claim.has_init:
            return False
        missing = f"there is no init = {self._init!r} on {claim.host}"
        if not await asyncio.to_thread(os.path.exists, self._init):
            nor = "" if claim.machine == machine() else ", nor on the driver's host"
            raise ConfigError(f"{missing}{nor}")
        if names is None:
            raise ConfigError(
                f"{missing}, and only there it is known which tensors the stage has, since its "
                "module cannot be built on the driver's host: copy it there, to the same path"
            )
        excerpt = await asyncio.to_thread(Excerpt, WeightFiles(self._init), names)
        if excerpt.key != claim.weights_key:
            await client.put(self._config(excerpt))
            await client.put(self._weights(excerpt, client.name, claim.host))
        return True

    async def _config(self, excerpt: Excerpt) -> AsyncIterator[pb.PutRequest]:
        """Send the file, or nothing instead of one that was sent before."""
        yield self._head(CONFIG, len(excerpt.config))
        if excerpt.config:
            yield pb.PutRequest(data=excerpt.config)

    async def _weights(
        self, excerpt: Excerpt, label: str, host: str
    ) -> AsyncIterator[pb.PutRequest]:
        whole, sent, told_at = format_size(excerpt.size), 0, time.monotonic()
        self._say(label, f"there is no {self._init} on {host}: it is sent {whole} of it")
        yield self._head(SINGLE, excerpt.size, excerpt.key)
        blocks = excerpt.blocks()
        while block := await asyncio.to_thread(next, blocks, b""):
            yield pb.PutRequest(data=block)
            sent += len(block)
            if time.monotonic() - told_at >= TELL_SECONDS:
                told_at = time.monotonic()
                self._say(label, f"{format_size(sent)} of {whole} have been sent")

    def _head(self, name: str, size: int, key: str = "") -> pb.PutRequest:
        """Return the first message of a file; the one with the key is the last file."""
        return pb.PutRequest(
            job_id=self._job_id,
            generation=self._generation,
            file=pb.CheckpointFile(path=name, size=size, sha256=key),
            is_init=True,
        )
