"""The command `rpcmp verify` on real workers, which may differ by the wire or distributed autograd.

Examples are zeros instead of None, strides, and dtypes. tests/group compares the bits of every kind
of job.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.chains import CHAINS, GRAPH, PADDED
from tests.support.processes import JobFolder, rpcmp


def verified(config: Path, *overrides: str) -> str:
    """Return the output of `rpcmp verify` for three steps, which must all be equal."""
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("verify", config, "--steps", "3", *options)
    assert result.code == 0, result.err
    return result.out


def chain(name: str) -> str:
    """Return one of CHAINS by the start of its name."""
    (found,) = (text for key, text in CHAINS.items() if key.startswith(name))
    return found


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (chain("layers in place"), ["schedule=gpipe"]),
        (
            chain("tuples, dicts"),
            ["schedule=1f1b", "microbatches_per_message=2", "max_in_flight=64"],
        ),
        (GRAPH, ["schedule=zero-bubble"]),
        (PADDED, ["schedule=zero-bubble", "data.at=stage"]),
    ],
    ids=["in place", "trees in bundles", "a graph", "weights at stages"],
)
def test_a_job_gives_the_bits_of_one_process(
    job: JobFolder, text: str, overrides: list[str]
) -> None:
    assert "identical: 3 losses" in verified(job.config(text), *overrides)


def test_bfloat16_on_the_wire_makes_a_small_difference_that_is_reported(
    job: JobFolder,
) -> None:
    text = 'wire_dtype = "bfloat16"\n[model]\nlayers = "zoo:mlp"\nbalance = [1, 1, 2]'
    found = verified(job.config(text))
    numbers = re.findall(r"by (?:up to )?(\d\.\de[-+]\d\d)", found)
    assert found.startswith("different, as wire_dtype = 'bfloat16' makes it: losses")
    assert [0 < float(number) < 2**-7 for number in numbers] == [True, True]


def test_a_difference_is_named_and_exits_1(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:impure"\nbalance = [1, 1]')
    result = rpcmp("verify", config, "--steps", "2")
    assert result.code == 1
    assert "step 1: loss" in result.err
