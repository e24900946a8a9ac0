"""The examples that ship with the package: they learn, and every bit is that of one process."""

from __future__ import annotations

import pytest

from tests.processes import EXAMPLES, Result, rpcmp

SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


def verify(example: str, steps: int, *overrides: str) -> str:
    """The hash of a verified run."""
    options = [part for override in overrides for part in ("--set", override)]
    config = EXAMPLES / f"{example}.toml"
    result = rpcmp("verify", config, "--steps", str(steps), *options, timeout=280)
    assert result.code == 0, result.err
    return result.out.split()[-1]


def drive(example: str) -> Result:
    """A whole run, as the README has it."""
    result = rpcmp("drive", EXAMPLES / f"{example}.toml", "--json", timeout=280)
    assert result.code == 0, result.err
    return result


@pytest.mark.long
def test_two_towers_gives_the_bits_of_one_process() -> None:
    verify("two_towers", 5, "data.batch_size=50", "num_microbatches=7")


@pytest.mark.long
def test_stdlib_gpt_gives_the_bits_of_one_process() -> None:
    verify("stdlib_gpt", 1, "num_microbatches=3")


@pytest.mark.long
def test_two_towers_learns() -> None:
    assert drive("two_towers").event("summary")["metrics"]["accuracy"] >= 0.97


@pytest.mark.long
def test_stdlib_gpt_learns() -> None:
    result = drive("stdlib_gpt")
    assert result.event("summary")["metrics"]["entropy_ratio"] <= 0.7
    assert "def " in result.event("report")["text"]


@pytest.mark.long
@pytest.mark.parametrize("example", ["digits", "stdlib_gpt"])
def test_one_hash_for_all_stage_counts_and_schedules(example: str) -> None:
    hashes = {
        verify(example, 3, f"schedule={schedule}", f"model.num_stages={count}")
        for schedule in SCHEDULES
        for count in (2, 3, 4)
    }
    assert len(hashes) == 1


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("example", ["digits", "stdlib_gpt", "two_towers"])
def test_micro_batches_that_do_not_divide_the_batch(example: str, schedule: str) -> None:
    verify(example, 3, f"schedule={schedule}", "num_microbatches=7")


@pytest.mark.long
@pytest.mark.parametrize("example", ["digits", "two_towers"])
def test_32_micro_batches_in_flight(example: str) -> None:
    verify(example, 3, "schedule=gpipe", "num_microbatches=32", "data.batch_size=100")
