"""The group of a claimed job, and what a certificate allows its holder there. Pure.

    driver             ──> everything
    stage N, a spare   ──> what members may, and what stage N may
    a stage not in it  ──> nothing

Replicas of a stage have the same role, and a spare can be any stage, so a certificate tells neither
apart. Without certificates every caller is this user, and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rpcmp import members
from rpcmp.errors import ConfigError, SecurityError
from rpcmp.v1 import control_pb2 as pb
from rpcmp.wire.role import Role


@dataclass(frozen=True)
class Group:
    """A job's stages.

    Attributes:
        job: the job's name, for errors.
        stages: their names, in order.
        replicas: how many each of them has.
    """

    job: str
    stages: Sequence[str]
    replicas: Sequence[int]

    @classmethod
    def of(cls, request: pb.PrepareRequest) -> Self:
        """Return the group that a request wants a member for.

        Raises:
            ConfigError: the member is not in it.
        """
        group = cls(
            request.job,
            [stage.name for stage in request.group],
            [stage.replicas for stage in request.group],
        )
        index, replica = request.stage_index, request.replica
        if index >= len(group.stages) or replica >= group.replicas[index]:
            raise ConfigError(
                f"job {request.job!r} has no stage {index} replica {replica} in its group of "
                f"{len(group.stages)} stages"
            )
        return group

    def member(self, stage_index: int, replica: int) -> str:
        """The RPC name of a replica."""
        return members.member(self.stages[stage_index], replica)

    def index(self, stage_name: str) -> int | None:
        """The index of a stage; None: there is none of that name."""
        return self.stages.index(stage_name) if stage_name in self.stages else None

    def require_member(self, role: Role | None, what: str) -> None:
        """Refuse a certificate that no member of the group can have.

        Args:
            role: in the certificate; None: there are no certificates.
            what: the caller wants to do, "use the rendezvous".

        Raises:
            SecurityError: it is not a member's.
        """
        if role is None or role.is_driver or any(map(role.may_serve, range(len(self.stages)))):
            return
        raise SecurityError(
            f"the certificate is for {role}, which may not {what} of job {self.job!r}: only its "
            f"{len(self.stages)} stages and its driver may"
        )

    def require_name(self, role: Role | None, name: str) -> None:
        """Refuse a certificate that is not for the member of this RPC name.

        Args:
            role: in the certificate; None: there are no certificates.
            name: the member's.

        Raises:
            SecurityError: it is for another.
        """
        if role is None or role.is_driver:
            return
        own = {
            self.member(index, replica)
            for index, count in enumerate(self.replicas)
            if role.may_serve(index)
            for replica in range(count)
        }
        if name not in own:
            raise SecurityError(
                f"the certificate is for {role}, which may not join job {self.job!r} as {name!r}"
            )

    def require_stage(self, role: Role | None, stage_index: int | None, what: str) -> None:
        """Refuse a certificate that is not for one stage of the group.

        Args:
            role: in the certificate; None: there are no certificates.
            stage_index: the stage; None: none may.
            what: the caller wants to do.

        Raises:
            SecurityError: it is not that stage's.
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
