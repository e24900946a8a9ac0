"""Access to a job by the role of a certificate: which members it may claim or look up."""

from __future__ import annotations

import contextlib

import pytest

from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net import identity
from rpcmp.net.identity import Role
from rpcmp.server.access import GroupMembers, GroupStage
from rpcmp.v1 import control_pb2 as pb

GROUP = GroupMembers("j", {0: GroupStage("a", 1), 1: GroupStage("b", 2)})


@pytest.mark.parametrize("index", [0, 1, 2, None])
@pytest.mark.parametrize(
    ("holder", "is_member", "may_be"),
    [
        (None, True, {0, 1, 2, None}),
        (identity.DRIVER, True, {0, 1, 2, None}),
        (identity.SPARE, True, {0, 1, 2}),
        (identity.stage(0), True, {0}),
        (identity.stage(1), True, {1}),
        (identity.stage(2), False, {2}),
    ],
)
def test_a_role_permits_its_methods(
    holder: Role | None, is_member: bool, may_be: set[int | None], index: int | None
) -> None:
    with expected(is_member):
        GROUP.require_member(holder, "look at files")
    with expected(index in may_be):
        GROUP.require_stage(holder, index, "be a stage")


def expected(is_allowed: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context that expects a SecurityError, unless `is_allowed`."""
    message = r"^the certificate is for .*, which may not (look|be) .* of job 'j': "
    return contextlib.nullcontext() if is_allowed else pytest.raises(SecurityError, match=message)


@pytest.mark.parametrize(("stage", "replica"), [(2, 0), (0, 1), (1, 2)])
def test_a_claim_is_refused_for_a_member_outside_the_group(stage: int, replica: int) -> None:
    group = [
        pb.GroupStage(name="a", replicas=1, stage_index=0),
        pb.GroupStage(name="b", replicas=2, stage_index=1),
    ]
    request = pb.PrepareRequest(job="j", stage_index=stage, replica=replica, group=group)
    with pytest.raises(ConfigError, match=f"no stage {stage} replica {replica} in its group of 2"):
        GroupMembers.of(request)


def test_members_join_under_their_own_names() -> None:
    for holder, name in ((None, "a:0"), (identity.DRIVER, "b:1"), (identity.stage(1), "b:1")):
        GROUP.require_name(holder, name)
    for holder, name in (
        (identity.stage(1), "a:0"),
        (identity.stage(1), "driver"),
        (identity.SPARE, "c:0"),
    ):
        with pytest.raises(SecurityError):
            GROUP.require_name(holder, name)


def test_a_stage_keeps_its_number_where_others_have_left() -> None:
    group = GroupMembers("j", {1: GroupStage("b", 1), 7: GroupStage("new", 1)})
    assert group.own(pb.PrepareRequest(stage_index=7)).name == "new:0"
    group.require_name(identity.stage(1), "b:0")
    group.require_name(identity.SPARE, "new:0")
    for gone in (identity.stage(0), identity.stage(2)):
        with pytest.raises(SecurityError):
            group.require_member(gone, "use the rendezvous")
    with pytest.raises(ConfigError, match="has no stage 0 replica 0"):
        group.own(pb.PrepareRequest(job="j", stage_index=0))


@pytest.mark.parametrize("moves_layers", [False, True])
def test_stages_read_each_others_snapshots_only_if_layers_move(moves_layers: bool) -> None:
    request = pb.FetchRequest(stage_name="a", step=3)
    GROUP.require_may_fetch(identity.stage(0), request, None, moves_layers)
    with contextlib.nullcontext() if moves_layers else pytest.raises(SecurityError):
        GROUP.require_may_fetch(identity.stage(1), request, None, moves_layers)
    with pytest.raises(SecurityError, match="may not read snapshots of 'a' of job 'j'"):
        GROUP.require_may_fetch(identity.stage(2), request, None, moves_layers)
