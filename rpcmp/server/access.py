"""Which calls a certificate permits: per group of a job, and per method. No I/O.

    driver             ──> everything
    stage N, a spare   ──> the methods for members, and the data of stage N; that of all stages of a
                           job that moves layers from stage to stage
    any other stage    ──> nothing

Replicas of a stage have the same role, and a spare can be any stage, so a certificate tells neither
apart. Without certificates every caller is this user, and allowed. Only drivers may call the rest:
the caller of Prepare decides which code a host runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import grpc

from rpcmp.config.topology import Member, member_name
from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net.identity import Role
from rpcmp.server.hardened_grpc import Callers, Interceptor
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.server.hardened_grpc import GrpcContext, Handler


class GroupStage(NamedTuple):
    """A stage of a job's group, and the number of its replicas."""

    name: str
    replicas: int


@dataclass(frozen=True)
class GroupMembers:
    """The stages of a job's group.

    Attributes:
        job: the job's name, for errors.
        stages: by the number that the certificates of their servers are for. That is their place
            in the config, until hosts have joined or left.
    """

    job: str
    stages: Mapping[int, GroupStage]

    @classmethod
    def of(cls, request: pb.PrepareRequest) -> Self:
        """Return the group of a Prepare request."""
        group = cls(
            request.job,
            {each.stage_index: GroupStage(each.name, each.replicas) for each in request.group},
        )
        group.own(request)
        return group

    def own(self, request: pb.PrepareRequest) -> Member:
        """Return the worker that a Prepare request is for."""
        index, replica = request.stage_index, request.replica
        stage = self.stages.get(index)
        if stage is None or replica >= stage.replicas:
            raise ConfigError(
                f"job {request.job!r} has no stage {index} replica {replica} in its group of "
                f"{len(self.stages)} stages"
            )
        return Member(stage.name, index, replica, stage.replicas)

    @property
    def is_replicated(self) -> bool:
        return any(stage.replicas > 1 for stage in self.stages.values())

    def require_member(self, role: Role | None, what: str) -> None:
        """Refuse a certificate that no member of the group can have.

        Args:
            role: the caller's; None without certificates.
            what: for the error, "use the rendezvous".
        """
        if role is None or role.is_driver or any(map(role.may_serve, self.stages)):
            return
        raise SecurityError(
            f"the certificate is for {role}, which may not {what} of job {self.job!r}: only its "
            f"{len(self.stages)} stages and its driver may"
        )

    def require_name(self, role: Role | None, name: str) -> None:
        """Refuse a certificate that does not belong to the member with this RPC name."""
        if role is None or role.is_driver:
            return
        own = {
            member_name(stage.name, replica)
            for index, stage in self.stages.items()
            if role.may_serve(index)
            for replica in range(stage.replicas)
        }
        if name not in own:
            raise SecurityError(
                f"the certificate is for {role}, which may not join job {self.job!r} as {name!r}"
            )

    def require_stage(self, role: Role | None, stage_index: int | None, what: str) -> None:
        """Refuse a certificate that does not belong to a stage of the group.

        Args:
            role: the caller's; None without certificates.
            stage_index: the stage; None permits no stage.
            what: for the error.
        """
        if role is None or role.is_driver:
            return
        if stage_index is not None and role.may_serve(stage_index):
            return
        allowed = "no stage" if stage_index is None else f"only stage {stage_index}"
        raise SecurityError(
            f"the certificate is for {role}, which may not {what} of job {self.job!r}: "
            f"{allowed} may"
        )

    def require_may_fetch(
        self,
        role: Role | None,
        request: pb.FetchRequest,
        mirrored_by: int | None,
        moves_layers: bool = False,
    ) -> None:
        """Refuse a snapshot or file that the caller's certificate gives no right to.

        Args:
            mirrored_by: index of the stage that mirrors the server's own; None: no stage does.
            moves_layers: whether stages may have to take layers over from any other.
        """
        name = request.stage_name
        if request.path:
            self.require_member(role, "read its checkpoints")
        elif request.newer:
            self.require_stage(role, mirrored_by, f"mirror stage {name!r}")
        elif moves_layers:
            self.require_member(role, f"read snapshots of {name!r}")
        else:
            named = (index for index, stage in self.stages.items() if stage.name == name)
            index = next(named, None)
            self.require_stage(role, index, f"read snapshots of {name!r}")


ALLOWED = (
    "/grpc.health.v1.Health/Check",
    "/rpcmp.v1.Control/Describe",
    "/rpcmp.v1.Rendezvous/",
    "/rpcmp.v1.Snapshots/Fetch",
)
"""Prefixes of the methods that a stage may call."""


class OnlyPeers(Interceptor):
    """Refuses all other methods, before a byte of the message is parsed."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        call: grpc.HandlerCallDetails,
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(call)
        if call.method.startswith(ALLOWED) or handler is None:
            return handler
        return _refusing(handler, call.method, self._callers)


def _refusing(handler: Handler, method: str, callers: Callers) -> Handler:
    async def refuse(request: object, grpc_context: GrpcContext) -> None:
        why = (
            f"the certificate is for a stage, and only a driver may call {method}: `rpcmp certs "
            "issue DIR --driver` makes one for it"
        )
        if callers.is_stranger(grpc_context.peer()):
            why = (
                f"this server does not let that process call {method}: either it works for another "
                "process's job alone, or the caller is confined or in another container; with "
                "--certs both ends prove who they are"
            )
        await grpc_context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
