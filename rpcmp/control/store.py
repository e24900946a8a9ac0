"""The rendezvous store of a group, as torch's RPC agent sees it.

A torch.distributed.Store in Python over our own gRPC service: no TCPStore and no Gloo group, so
no further listening socket, and everything that crosses hosts goes over the one control port.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc
from torch.distributed import Store  # type: ignore[attr-defined]

from rpcmp.control.options import CHANNEL_OPTIONS
from rpcmp.errors import UnreachableError
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import RendezvousStub

CONNECT_SECONDS = 10.0


class GrpcStore(Store):
    """Key-value store of one generation, served by one of the job's stage servers.

    Args:
        address: HOST:PORT of that server.
        job_id, generation: which job's store.
    """

    def __init__(self, address: str, job_id: str, generation: int) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise UnreachableError(
                f"the rendezvous at {address} does not answer within {CONNECT_SECONDS:.0f} s; it "
                "is the first stage's server, which every other stage must be able to reach"
            ) from error
        self._stub = RendezvousStub(self._channel)
        self._job: dict[str, Any] = {"job_id": job_id, "generation": generation}

    def set(self, key: str, value: bytes | str) -> None:
        self._stub.Set(pb.SetRequest(**self._job, key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._stub.Get(pb.GetRequest(**self._job, keys=[key])).value

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        request = pb.CompareSetRequest(
            **self._job, key=key, expected=_bytes(expected), desired=_bytes(desired)
        )
        return self._stub.CompareSet(request).value

    def add(self, key: str, value: int) -> int:
        return self._stub.Add(pb.AddRequest(**self._job, key=key, amount=value)).value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # A peer that never comes is the supervisors' business, not a timeout's.
        self._stub.Get(pb.GetRequest(**self._job, keys=keys))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
