"""Answers that lie in shared memory while they travel, and open where they arrive."""

from __future__ import annotations

import pickle

import pytest
import torch

from rpcmp.rpc import shared_memory
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.messages import GradientPart, StageOutputs
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor


def arrived(own: OwnMemory, lent: object) -> SharedTensor:
    """Return what a reader gets of a tensor that `own` has lent."""
    tensor = pickle.loads(pickle.dumps(lent))
    assert isinstance(tensor, SharedTensor)
    tensor.attach(PeerMemory(own.address.fd))
    return tensor


def test_outputs_open_once_as_leaves_of_a_graph_of_their_reader() -> None:
    own = OwnMemory()
    trained = arrived(own, own.place(torch.ones(2), requires_grad=True).lend())
    index = arrived(own, own.place(torch.arange(2)).lend())
    opened = StageOutputs({"x": trained, "index": index, "n": 3}).opened()
    assert {key: type(value) for key, value in opened.value.items()} == {
        "x": torch.Tensor,
        "index": torch.Tensor,
        "n": int,
    }
    assert [opened.value[key].requires_grad for key in ("x", "index")] == [True, False]
    assert opened.shared == (trained, index)
    assert opened.opened().shared == (trained, index)


def test_outputs_that_torch_rpc_has_sent_stay_as_they_are() -> None:
    for value in (torch.ones(1), {"x": torch.ones(1), "n": 3}, "text"):
        outputs = StageOutputs(value)
        assert outputs.opened() is outputs


def test_parts_of_gradients_are_lent_where_they_lie_and_sent_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "WORTH_SHARING", 8)
    own = OwnMemory()
    shared = own.place(torch.arange(6.0))
    part = GradientPart(shared.tensor, (True, False), shared)
    sent = part.sent(slice(2, 4))
    assert sent.values.tolist() == [2, 3]
    assert sent.shared is None
    lent = part.lend(slice(2, 4))
    assert lent.values.numel() == 0  # torch RPC has nothing to carry
    opened = lent._replace(shared=arrived(own, lent.shared)).opened()
    assert opened.values.tolist() == [2, 3]
    assert opened.has == (True, False)
    assert part.lend(slice(0, 1)).values.tolist() == [0]  # too few bytes to be worth a block


def test_a_part_outside_of_shared_memory_is_sent_to_everyone() -> None:
    part = GradientPart(torch.arange(3.0), (True,))
    assert part.lend(slice(1, 3)).values.tolist() == [1, 2]
    assert part.opened() is part
