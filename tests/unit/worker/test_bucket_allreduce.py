"""The all-reduce of gradients between members in one process, without a network."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.futures import Future

from rpcmp.errors import JobError
from rpcmp.rpc import shared_memory, transport
from rpcmp.rpc.group_memory import GroupMemory
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.messages import GradientPart
from rpcmp.rpc.shared_memory import OwnMemory
from rpcmp.worker import buckets, weight_grad
from rpcmp.worker.bucket_allreduce import BucketAllReduce
from rpcmp.worker.buckets import GradientReadyTracker
from rpcmp.worker.weight_grad import WeightGradients
from tests.support.processes import poll_for

SHAPES = [(3, 5), (7,), (40, 30), (), (200, 400)]
"""Shapes of parameters; the last one is a bucket with chunks if WHOLE_BYTES is small."""


class Members:
    """Members that call each other directly, on their own threads.

    Args:
        num_members: number of members.
        dtypes: dtypes of the parameters, in turn.

    Every second member shares memory with the others.
    """

    def __init__(self, num_members: int, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
        self.memory = OwnMemory()
        memory = PeerMemory(self.memory.address.fd)
        served = transport._served.memory = GroupMemory("", str.encode)
        served.members = {f"member {n}": memory for n in range(num_members)}
        self.parameters = [
            [
                nn.Parameter(torch.zeros(shape, dtype=dtypes[n % len(dtypes)]))
                for n, shape in enumerate(SHAPES)
            ]
            for _ in range(num_members)
        ]
        self._pool = ThreadPoolExecutor(8)
        self.summing: list[BucketAllReduce] = []
        for rank, mine in enumerate(self.parameters):
            peers = [_Peer(self, member) for member in range(num_members)]
            self.summing.append(BucketAllReduce(mine, rank, cast(Any, peers), lambda: self.memory))

    def later(self, future: Future[Any], answer: Future[Any]) -> None:
        def pass_on(done: Future[Any]) -> None:
            self._pool.submit(answer.set_result, _sent(done.value()))

        future.add_done_callback(pass_on)

    def give(self, seed: int, missing: Sequence[tuple[int, int]] = ()) -> list[Tensor | None]:
        """Assign random gradients, except for `missing` pairs (member, index); return the sums."""
        generator = torch.Generator().manual_seed(seed)
        totals: list[Tensor | None] = [None] * len(SHAPES)
        for rank, mine in enumerate(self.parameters):
            for index, parameter in enumerate(mine):
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if (rank, index) in missing else drawn
                if parameter.grad is not None:
                    total = totals[index]
                    totals[index] = drawn.clone() if total is None else total + drawn
        return totals

    def sum(self, key: int, order: Sequence[int] | None = None) -> None:
        """Launch all buckets of all members, in this order of members, and finish."""
        for rank in order or range(len(self.summing)):
            for number in range(len(self.summing[rank].buckets)):
                self.summing[rank].launch(key, number, computes=number % 2 == 0)
        list(self._pool.map(lambda one: one.finish(key), self.summing))

    def gradients(self) -> list[list[Tensor | None]]:
        return [[parameter.grad for parameter in mine] for mine in self.parameters]


class _Peer:
    """A member as the other members call it."""

    def __init__(self, members: Members, member: int) -> None:
        self.name = f"member {member}"
        self._members, self._member = members, member

    def gradient_part(self, rank: int, round_number: int, bucket: int) -> Future[Any]:
        shares_memory = self._member % 2 == 0
        return self._passed(self._called.part(rank, round_number, bucket, shares_memory))

    def gradient_total(self, round_number: int, bucket: int) -> Future[Any]:
        shares_memory = self._member % 2 == 0
        return self._passed(self._called.chunk_total(round_number, bucket, shares_memory))

    @property
    def _called(self) -> BucketAllReduce:
        return self._members.summing[self._member]

    def _passed(self, future: Future[Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._members.later(future, answer)
        return answer


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "WORTH_SHARING", 64)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(buckets, "WHOLE_BYTES", 2048)


def test_a_bucket_that_is_full_is_closed() -> None:
    half, small = (nn.Parameter(torch.empty(size)) for size in (512, 1))  # 4096 bytes are a bucket
    packed = buckets.pack([small, half, half, half])
    assert [bucket.indices for bucket in packed] == [(3, 2), (1, 0)]
    other = nn.Parameter(torch.empty(1, dtype=torch.float64))
    packed = buckets.pack([half, other, half, small])
    assert [bucket.indices for bucket in packed] == [(3, 2, 0), (1,)]


def _sent(value: Any) -> Any:
    """Copy a message, because a received message does not share the sender's memory."""
    if not isinstance(value, GradientPart):
        return value
    if value.shared is None:
        return value._replace(values=value.values.clone())
    return value._replace(shared=pickle.loads(pickle.dumps(value.shared)))


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the members' requests, which grow from now on."""
    calls: list[str] = []

    def record(name: str) -> None:
        call = getattr(_Peer, name)

        def recorded(peer: _Peer, *args: int) -> Future[Any]:
            calls.append(name)
            future: Future[Any] = call(peer, *args)
            return future

        monkeypatch.setattr(_Peer, name, recorded)

    record("gradient_part")
    record("gradient_total")
    return calls


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_all_members_get_the_sum_in_the_order_of_ranks(num_members: int) -> None:
    members = Members(num_members, [torch.float32, torch.float64])
    for key in range(1, 4):
        totals = members.give(key)
        members.sum(key, order=[*range(num_members)][:: (-1) ** key])
        for mine in members.gradients():
            assert all(map(same, mine, totals))
    # What was read last is counted by the thread that has read it.
    poll_for(lambda: not any(one._sums for one in members.summing), "the last sum to be dropped")


@pytest.mark.parametrize("num_members", [2, 3])
def test_members_ask_for_all_before_anyone_has_it(
    monkeypatch: pytest.MonkeyPatch, num_members: int
) -> None:
    calls = record_calls(monkeypatch)
    members = Members(num_members)
    for one in members.summing:
        one.expect(1)
    asked = len(calls)
    assert asked
    totals = members.give(1)
    members.sum(1)
    assert len(calls) == asked
    assert all(all(map(same, mine, totals)) for mine in members.gradients())
    # What was read last is counted by the thread that has read it.
    poll_for(lambda: not any(one._sums for one in members.summing), "the last sum to be dropped")


@pytest.mark.parametrize("num_members", [2, 3])
def test_what_all_have_read_goes_without_a_garbage_collection(num_members: int) -> None:
    """Or the memory that members share would grow with every step until there is one."""
    members = Members(num_members)
    left = [weakref.ref(one) for summing in members.summing for one in summing._reductions(1)]
    gc.disable()
    try:
        members.give(1)
        members.sum(1)
        ends = time.monotonic() + 30  # other threads may still return from their last call
        while any(one() for one in left) and time.monotonic() < ends:
            time.sleep(0.01)
        assert not any(one() for one in left)
    finally:
        gc.enable()


@pytest.mark.parametrize(("size", "requests"), [(0, 2), (1, 2), (2, 4), (3, 6)])
def test_members_exchange_nothing_about_chunks_without_elements(
    monkeypatch: pytest.MonkeyPatch, size: int, requests: int
) -> None:
    """One of three members sums an empty bucket, so that its sum ends."""
    monkeypatch.setitem(globals(), "SHAPES", [(size,)])
    monkeypatch.setattr(buckets, "WHOLE_BYTES", 0)
    calls = record_calls(monkeypatch)
    members = Members(3)
    expected = members.give(1)
    members.sum(1)
    assert all(all(map(same, mine, expected)) for mine in members.gradients())
    assert Counter(calls) == {"gradient_part": requests, "gradient_total": requests}


def test_a_sum_of_nothing_is_not_kept() -> None:
    alone = BucketAllReduce([], 0, [])
    for round_number in range(1, 4):
        alone.expect(round_number)
        alone.finish(round_number)
    assert not alone._sums


def test_two_members_sum_an_empty_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SHAPES", [(0, 3)])
    members = Members(2)
    members.give(1)
    members.sum(1)
    assert [mine[0].grad is not None for mine in members.parameters] == [True, True]


def test_none_gradients_are_left_out_and_stay_none_if_all_are() -> None:
    members = Members(3)
    missing = [(0, 0), (1, 0), (2, 1), (0, 4), *((rank, 2) for rank in range(3))]
    totals = members.give(7, missing)
    assert totals[2] is None
    for parameter in members.parameters[1][4:]:
        assert parameter.grad is not None
        parameter.grad.fill_(-0.0)  # member 0 has none, so the sum is this plus member 2's
    totals[4] = members.parameters[1][4].grad + members.parameters[2][4].grad  # type: ignore[operator]
    members.sum(1)
    for mine in members.gradients():
        assert all(map(same, mine, totals))


def test_a_single_members_minus_zero_stays_minus_zero() -> None:
    members = Members(2)
    members.give(1, [(1, 4)])
    assert members.parameters[0][4].grad is not None
    members.parameters[0][4].grad.fill_(-0.0)
    members.sum(1)
    for mine in members.gradients():
        assert mine[4] is not None
        assert torch.signbit(mine[4]).all()


def test_an_aborted_sum_fails_all_that_wait_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(2)
    members.give(1)
    for one in members.summing:
        one.expect(1)
    for number in range(len(members.summing[0].buckets)):
        members.summing[0].launch(1, number, computes=True)

    def wait() -> None:
        with pytest.raises(JobError):
            members.summing[0].finish(1)

    waiting = threading.Thread(target=wait)
    waiting.start()
    for one in members.summing:
        one.abort(1, 1, JobError("given up"))
    waiting.join(30)
    assert not waiting.is_alive()
    with pytest.raises(JobError):
        members.summing[1].finish(1)
    calls = record_calls(monkeypatch)
    members.summing[0].expect(1)
    assert not calls
    totals = members.give(2)
    members.sum(2)
    assert all(all(map(same, mine, totals)) for mine in members.gradients())


def test_a_request_that_cannot_be_sent_fails_the_sum_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(_Peer, "gradient_part", refuse)
    member = Members(2).summing[0]
    member.expect(1)
    member.launch(1, 0, computes=False)
    with pytest.raises(OSError, match="planted"):
        member.finish(1)


def test_sparse_gradients_are_refused_at_every_member() -> None:
    members = Members(2)
    members.give(1)
    weight = members.parameters[0][2]
    weight.grad = weight.detach().to_sparse()
    for one in members.summing:
        for number in range(len(one.buckets)):
            one.launch(1, number, computes=True)
    with pytest.raises(ValueError, match="sparse gradients cannot be summed"):
        members.summing[0].finish(1)
    with pytest.raises(JobError, match="sparse"):
        members.summing[1].finish(1)


def test_a_gradient_that_is_not_contiguous_keeps_its_strides() -> None:
    members = Members(2)
    totals = members.give(3)
    for mine in members.parameters:
        grad = mine[2].grad
        assert grad is not None
        mine[2].grad = grad.t().contiguous().t()
    members.sum(1)
    for gradients in members.gradients():
        assert all(map(same, gradients, totals))
        assert gradients[2] is not None
        assert not gradients[2].is_contiguous()


# Gradients that are ready before the end


class Watched:
    """Layers that some micro-batches use, and the tracker of their gradients."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.ready: list[int] = []
        weights = [parameter for layer in self.layers for parameter in layer.parameters()]
        self.readiness = GradientReadyTracker(weights, [[2], [1], [0]], self.ready.append)

    def round(self, *used: str) -> list[int]:
        """Run a micro-batch per string of layers ("02"); return the early ready buckets."""
        self.ready.clear()
        self.readiness.start_round(len(used), is_early=True)
        for layers in used:
            x = torch.ones(1, 2)
            for index in layers:
                x = self.layers[int(index)](x)
            x.sum().backward()
        ready = list(self.ready)
        assert sorted([*ready, *self.readiness.finish_round()]) == [0, 1, 2]
        return ready


def test_no_bucket_is_early_in_the_first_round_and_all_in_the_next() -> None:
    watched = Watched()
    assert watched.round("012", "012") == []
    assert watched.round("012", "012", "012") == [0, 1, 2]  # the last layer first


def test_a_deferred_gradient_is_ready_once_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward that fails halfway does not count."""
    for name in ("linear", *weight_grad.CONVOLUTIONS):  # restores them after the test
        monkeypatch.setattr(F, name, getattr(F, name))
    weight_grad.install()
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2)))
    parameters = list(layers.parameters())
    ready: list[int] = []
    readiness = GradientReadyTracker(parameters, [[0, 1], [2, 3]], ready.append)

    def differentiate(fails: bool = False) -> WeightGradients:
        gradients = WeightGradients(frozenset(parameters))
        inputs = torch.ones(1, 2, requires_grad=True)
        with gradients.watch():
            found = layers(inputs).sum()
        if fails:
            inputs.register_hook(_fail)
        with gradients.defer():
            found.backward()
        return gradients

    for early in ([], [0, 1], [0, 1]):
        ready.clear()
        readiness.start_round(1, is_early=True)
        gradients = differentiate()
        assert ready == []
        gradients.accumulate()
        assert sorted(ready) == early
        readiness.finish_round()
        readiness.start_round(1, is_early=True)
        with pytest.raises(ValueError, match="planted"):
            differentiate(fails=True)


def _fail(_: Tensor) -> None:
    raise ValueError("planted")


def test_a_layer_that_is_not_always_used_is_never_early() -> None:
    watched = Watched()
    assert watched.round("012", "02") == []
    assert watched.round("012", "012") == [0, 2]
    assert watched.round("02", "02") == [0, 2]
    assert watched.round("012", "012") == [0, 2]
    assert watched.round("012") == [0, 1, 2]


def test_a_gradient_that_changes_after_it_was_ready_is_an_error() -> None:
    watched = Watched()
    watched.round("012")
    watched.round("0112")  # two uses in one backward are one change
    watched.readiness.start_round(1, is_early=True)
    for _ in range(2):
        watched.layers[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        watched.readiness.finish_round()
