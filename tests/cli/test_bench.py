"""Arguments that `rpcmp bench` refuses."""

from __future__ import annotations

import pytest

from tests.support.processes import rpcmp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slep"], "no bench case 'slep'; there are sleep, overhead, transformer, activations"),
        (["transformer", "--stages", "9"], "9 stages, but its model has 8 layers"),
        (["sleep", "transformer", "--stages", "9"], "9 stages, but its model has 8 layers"),
        (["sleep", "--microbatches", "0"], "0 is not in the range x>=1"),
        (["sleep", "--stages", "0"], "0 is not in the range x>=1"),
        (["sleep", "--pairs", "0"], "0 is not in the range x>=1"),
        (["sleep", "--set", "num_microbatches=-1"], "num_microbatches"),
        (["sleep", "--set", "schedule=fastest"], "schedule"),
        (["sleep", "--set", "model.kwargs.times_ms={forward=1.0}"], "each at least 0"),
        (["sleep", "--peers", "torch-1f1b,horovod"], "no contestant 'horovod'; there are"),
        (["missing.toml"], "cannot read missing.toml"),
    ],
)
def test_bad_input_ends_before_anything_starts(arguments: list[str], message: str) -> None:
    result = rpcmp("bench", *arguments)
    assert result.code == 2
    assert message in result.err
    assert "starting" not in result.err
