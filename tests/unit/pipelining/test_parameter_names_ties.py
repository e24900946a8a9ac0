"""Names of parameters that several stages share; for their values see tests/group/test_ties.py."""

from __future__ import annotations

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import parameter_names


def test_the_longest_name_of_a_layer_counts() -> None:
    config = parse_config(
        {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.zoo.models:layers"}}
    )
    unknown = dict.fromkeys(["a", "a.b", "c"])
    assert parameter_names.layer_of(config, "a.b.weight", unknown) == "a.b"
    with pytest.raises(ConfigError, match=r"'d\.weight' lies in no layer \(.* 'a', 'a.b', 'c'\)"):
        parameter_names.layer_of(config, "d.weight", unknown)
