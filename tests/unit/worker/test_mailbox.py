"""Buffers and parameters that replicas copy from replica 0, and buffers that are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.futures import Future

from rpcmp.config.topology import Member
from rpcmp.rpc.messages import TensorKey
from rpcmp.worker.mailbox import ReplicaBroadcast, TensorMailbox


class _Model:
    """A stand-in for a StageModel: a layer with a table and running statistics."""

    def __init__(self) -> None:
        self.layer = nn.BatchNorm1d(4)
        self.layer.register_buffer("table", torch.arange(1000.0))
        self.layer.register_buffer("sign", torch.zeros(1))

    def modules(self) -> Iterator[nn.Module]:
        return self.layer.modules()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.layer.named_parameters()

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.layer.named_buffers())


class _Replicas:
    """Two replicas that share the mailbox of replica 0."""

    name = "stage"

    def __init__(self) -> None:
        self.mailbox = TensorMailbox()
        self.sent: list[list[Tensor | None]] = []
        self.models = [_Model(), _Model()]
        first = cast(Any, self)
        self.following = [
            ReplicaBroadcast(Member("stage", 0, replica, 2), cast(Any, model), self.mailbox, first)
            for replica, model in enumerate(self.models)
        ]

    def get_tensors(self, key: TensorKey) -> Future[Any]:
        """Answer the other replica as replica 0 does."""
        answer = self.mailbox.get(key)
        answer.add_done_callback(lambda done: self.sent.append(done.value()))
        return answer

    def sync_initial_state(self) -> None:
        for each in self.following:
            each.sync_initial_state()

    def exchange(self, round_number: int) -> None:
        for finish in [each.start_buffers(round_number) for each in self.following]:
            finish()

    def assert_equal(self) -> None:
        one, other = (model.buffers() for model in self.models)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_replicas_start_with_the_state_of_the_first() -> None:
    replicas = _Replicas()
    with torch.no_grad():
        replicas.models[0].layer.weight.fill_(3.0)
        replicas.models[0].layer.running_mean.fill_(2.0)  # type: ignore[union-attr]
    replicas.sync_initial_state()
    replicas.assert_equal()
    assert torch.equal(replicas.models[1].layer.weight, torch.full((4,), 3.0))


def test_only_changed_buffers_are_sent() -> None:
    replicas = _Replicas()
    replicas.sync_initial_state()
    for model in replicas.models:
        model.layer(torch.randn(8, 4))
    replicas.exchange(1)
    replicas.assert_equal()
    names = list(replicas.models[0].buffers())
    travelled = [
        name for name, sent in zip(names, replicas.sent[-1], strict=True) if sent is not None
    ]
    assert travelled == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_buffer_changed_by_another_replica_alone_is_reset() -> None:
    replicas = _Replicas()
    replicas.sync_initial_state()
    replicas.models[1].buffers()["table"].add_(1.0)
    replicas.exchange(1)
    replicas.assert_equal()


def test_buffers_are_compared_by_bits() -> None:
    replicas = _Replicas()
    replicas.sync_initial_state()
    replicas.models[0].buffers()["sign"].neg_()  # minus zero compares equal to zero
    replicas.models[0].buffers()["table"].fill_(torch.nan)
    replicas.exchange(1)
    taken = replicas.models[1].buffers()
    assert torch.signbit(taken["sign"]).all()
    assert taken["table"].isnan().all()
    replicas.models[0].buffers()["sign"].neg_()
    replicas.models[0].buffers()["table"].copy_(torch.arange(1000.0))
    replicas.exchange(2)  # the initial values again
    replicas.assert_equal()
    assert not torch.signbit(taken["sign"]).any()
