"""Bytes of the answers between members, for every transport."""

from __future__ import annotations

import torch

from rpcmp.process.sockets import PeerTraffic
from rpcmp.rpc.payload import Payload
from rpcmp.rpc.shared_memory import SharedTensor


def test_outputs_add_up_by_member_and_gradients_return_for_tensors_that_require_them() -> None:
    payload = Payload()
    trained = torch.zeros(10, requires_grad=True)
    payload.count("a:0", [trained, torch.zeros(3, dtype=torch.int64)])
    payload.count("a:0", [SharedTensor(0, 4096, torch.float16, (2, 2))])
    payload.count("b:0", [torch.zeros(1)])
    payload.count("c:0", [])  # not worth a mention
    assert payload.read() == [
        PeerTraffic("a:0", 40, 40 + 24 + 8, 0.0),
        PeerTraffic("b:0", 0, 4, 0.0),
    ]
