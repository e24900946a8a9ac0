"""The contestants of a case."""

from __future__ import annotations

import pytest

from rpcmp.errors import ConfigError
from rpcmp.tools.bench import cases, contestants


def test_peers_are_chosen_by_name() -> None:
    case = cases.load("transformer")
    names = [one.name for one in contestants.contestants(case, ["torch-best", "torch-best"])]
    assert names == ["rpcmp", "torch-best"]
    assert [one.name for one in contestants.contestants(case)] == list(contestants.CONTESTANTS)
    assert [one.name for one in contestants.contestants(case, [])] == ["rpcmp"]
    with pytest.raises(ConfigError, match="no contestant 'horovod'; there are rpcmp, one"):
        contestants.contestants(case, ["horovod"])


def test_every_peer_of_a_case_exists() -> None:
    chosen = [name for case in cases.frozen().values() for name in case.peers or ()]
    assert set(chosen) <= set(contestants.CONTESTANTS)
