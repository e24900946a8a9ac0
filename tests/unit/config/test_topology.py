"""Graphs of stages: edges, the order of the stages, and invalid graphs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.topology import Port, Reference, cut_into_bundles
from rpcmp.errors import ConfigError


def test_a_chain_reads_the_stage_before() -> None:
    assert topology.chain_graph(["a", "b", "c"]) == topology.build_graph(
        {"a": ["input"], "b": ["a"], "c": ["b"]}
    )


def test_a_graph_has_an_order_a_sink_and_ports_that_name_their_reader_and_part() -> None:
    two_branches = topology.build_graph(
        {
            "image": ["input"],
            "profile": ["input.profile"],
            "classifier": ["image", "profile", "input"],
        }
    )
    assert two_branches.stages == ("image", "profile", "classifier")
    assert two_branches.sink == "classifier"
    assert two_branches.ports("profile") == (Port("classifier", 1, ()),)
    assert two_branches.ports("classifier") == ()


def test_a_stage_with_two_edges_to_one_reader_has_two_ports() -> None:
    built = topology.build_graph({"a": ["input"], "b": ["a.left", "input", "a.right.0"]})
    assert built.ports("a") == (Port("b", 0, ("left",)), Port("b", 2, ("right", "0")))


def test_ports_come_in_the_order_in_which_the_readers_run() -> None:
    # The config lists "late" first, but it reads "early".
    built = topology.build_graph({"late": ["a", "early"], "a": ["input"], "early": ["a"]})
    assert built.stages == ("a", "early", "late")
    assert [port.reader for port in built.ports("a")] == ["early", "late"]


def test_depth_counts_the_longest_way_to_the_loss() -> None:
    skip = topology.build_graph({"a": ["input"], "b": ["a"], "c": ["b"], "d": ["a", "c"]})
    assert skip.depths() == {"a": 4, "b": 3, "c": 2, "d": 1}


def test_each_stage_is_counted_once_however_many_ways_lead_from_it() -> None:
    """Ways through a chain of skips: one more than 10**20, for each stage that reads two others."""
    inputs = {"stage0": ["input"], "stage1": ["stage0"]}
    inputs |= {f"stage{n}": [f"stage{n - 1}", f"stage{n - 2}"] for n in range(2, 100)}
    counted: list[str] = []

    def count(stage: str) -> int:
        counted.append(stage)
        return 1

    depths = topology.build_graph(inputs).depths(count)
    assert depths == {f"stage{n}": 100 - n for n in range(100)}
    assert sorted(counted) == sorted(inputs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image", ("image", (), False)),
        ("image.features.0", ("image", ("features", "0"), False)),
        ("input", ("input", (), True)),
        ("target.label", ("target", ("label",), True)),
    ],
)
def test_a_reference_survives_parsing_and_printing(
    text: str, expected: tuple[str, tuple[str, ...], bool]
) -> None:
    reference = Reference.parse(text)
    assert (reference.producer, reference.path, reference.from_batch) == expected
    assert str(reference) == text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": ["input"], "b": ["aa"]}, "there is no stage 'aa'; did you mean 'a'"),
        ({"a": ["inptu"]}, "did you mean 'input'"),
        ({"a": ["input"], "b": ["zzzzz"]}, "there is no stage 'zzzzz'$"),
        ({"a": []}, "stage 'a' reads nothing"),
        ({"a": ["a"]}, "form a cycle: 'a' reads 'a'"),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, "'a' reads 'b' reads 'c' reads 'a'"),
        ({"x": ["a"], "a": ["b"], "b": ["a"]}, "form a cycle: 'a' reads 'b' reads 'a'"),
        ({"a": ["input"], "b": ["a", "c"], "c": ["a", "b"]}, "cycle: 'b' reads 'c' reads 'b'"),
        ({"a": ["input"], "b": ["input"]}, "no stage reads 'a', 'b'"),
    ],
)
def test_an_invalid_graph_is_refused(inputs: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology.build_graph(inputs)


@st.composite
def shuffled_chains_with_skips(draw: st.DrawFn) -> dict[str, list[str]]:
    """Draw a chain with skip connections, listed in any order."""
    count = draw(st.integers(1, 7))
    inputs = {"s0": ["input"]}
    for index in range(1, count):
        skips = draw(st.sets(st.integers(0, index - 1)))
        inputs[f"s{index}"] = [f"s{i}" for i in sorted({index - 1, *skips})]
    return {name: inputs[name] for name in draw(st.permutations(list(inputs)))}


@settings(deadline=None, derandomize=True)
@given(shuffled_chains_with_skips())
def test_every_stage_comes_after_all_that_it_reads(inputs: dict[str, list[str]]) -> None:
    built = topology.build_graph(inputs)
    assert built.stages == tuple(f"s{index}" for index in range(len(inputs)))
    edges = sum(len(built.ports(stage)) for stage in built.stages)
    assert edges == sum(not ref.from_batch for refs in built.inputs.values() for ref in refs)


@pytest.mark.parametrize(
    ("num_microbatches", "per_message", "expected"),
    [
        (5, 1, [1, 1, 1, 1, 1]),
        (1, 4, [1]),
        (2, 4, [2]),
        (3, 4, [1, 1, 1]),
        (8, 2, [1, 2, 2, 2, 1]),
        (8, 8, [1, 6, 1]),
        (16, 8, [1, 3, 8, 3, 1]),
        (32, 6, [1, 3, 6, 6, 6, 6, 3, 1]),
    ],
)
def test_the_first_and_the_last_messages_are_small(
    num_microbatches: int, per_message: int, expected: list[int]
) -> None:
    assert [*map(len, cut_into_bundles(num_microbatches, per_message))] == expected


@given(st.integers(1, 200), st.integers(1, 50), st.booleans())
def test_every_micro_batch_is_in_one_bundle_and_none_is_too_large(
    num_microbatches: int, per_message: int, in_turns: bool
) -> None:
    bundles = cut_into_bundles(num_microbatches, per_message, in_turns)
    assert [*itertools.chain(*bundles)] == list(range(num_microbatches))
    sizes = [*map(len, bundles)]
    assert min(sizes) > 0
    assert max(sizes) <= per_message
    if in_turns:
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-num_microbatches // per_message)
