"""How two configs differ, one of which was stored; what is hidden: cluster/test_secrets.py."""

from __future__ import annotations

import json

from rpcmp.config.stored import changes, stored
from tests.support.graphs import chain_of

KWARGS = {"token": "secret", "lr": 0.1}


def test_a_stored_config_hides_texts_and_still_tells_what_has_changed() -> None:
    optimizer = {"callable": "torch.optim:SGD", "kwargs": KWARGS}
    before = json.loads(json.dumps(stored(chain_of(2, optimizer=optimizer))))
    assert "secret" not in str(before)
    assert changes(before, chain_of(2, optimizer=optimizer)) == []
    optimizer["kwargs"] = {"token": "another", "lr": 0.1}
    later = chain_of(2, optimizer=optimizer, steps=7, log={"folder": "elsewhere"})
    assert changes(before, later) == ["steps", "optimizer.kwargs.token"]
