"""The bits of a group, which equal one process. These tests detect nearly every mistake."""

from __future__ import annotations

import pytest

from rpcmp.config import loader
from tests.support.chains import CHAINS, GRAPH
from tests.support.localgroup import local_group, require_same_bits
from tests.support.localtransport import LocalTransport
from tests.support.processes import JobFolder

SCHEDULES = ["gpipe", "1f1b", "zero-bubble"]

BUNDLES = ["microbatches_per_message=2", "max_in_flight=64"]


def prove(job: JobFolder, text: str, *overrides: str) -> None:
    """Compare losses and parameters of a few steps with one process."""
    steps = 3 if "num_microbatches = 32" in text else 6
    found = require_same_bits(loader.load_config(job.config(text), [f"steps={steps}", *overrides]))
    assert len(found.losses) == steps


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("text", CHAINS.values(), ids=CHAINS)
def test_a_chain_gives_the_bits_of_one_process(job: JobFolder, text: str, schedule: str) -> None:
    prove(job, text, f"schedule={schedule}")


@pytest.mark.parametrize("text", CHAINS.values(), ids=CHAINS)
def test_a_chain_with_several_micro_batches_per_message_gives_the_bits_of_one_process(
    job: JobFolder, text: str
) -> None:
    prove(job, text, *BUNDLES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_some_micro_batches_of_a_message_may_be_worth_sharing(
    job: JobFolder, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 samples one micro-batch has 4, with 128 bytes, and two have 3."""
    monkeypatch.setattr(LocalTransport, "worth_sharing", 100)
    text = """
        num_microbatches = 3
        [model]
        layers = "zoo:mlp"
        num_stages = 4
    """
    for per_message in (2, 3):
        prove(job, text, f"schedule={schedule}", f"microbatches_per_message={per_message}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_graph_with_branches_and_skips_gives_the_bits_of_one_process(
    job: JobFolder, schedule: str
) -> None:
    prove(job, GRAPH, f"schedule={schedule}")


def test_a_graph_with_several_micro_batches_per_message_gives_the_bits_of_one_process(
    job: JobFolder,
) -> None:
    prove(job, GRAPH, "schedule=zero-bubble", "num_microbatches=5", *BUNDLES)


def test_one_hash_for_every_balance_and_schedule(job: JobFolder) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"')
    hashes = set()
    for num_stages, schedule in ((1, "1f1b"), (2, "gpipe"), (3, "zero-bubble"), (4, "1f1b")):
        cut = [f"model.num_stages={num_stages}", f"schedule={schedule}"]
        with local_group(loader.load_config(path, ["steps=3", *cut])) as local:
            local.train()
            hashes.add(local.group.parameters_sha256())
    assert len(hashes) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [15, pytest.param(50, marks=pytest.mark.long)])
def test_jitter_in_every_action_does_not_hang(job: JobFolder, schedule: str, steps: int) -> None:
    path = job.config("""
        num_microbatches = 8
        optimizer = "zoo:JitterSGD"
        [model]
        layers = "zoo:jittery"
        num_stages = 3
        [data]
        train = { callable = "zoo:regression", kwargs = { samples = 64 } }
        batch_size = 16
    """)
    with local_group(loader.load_config(path, [f"steps={steps}", f"schedule={schedule}"])) as local:
        assert len(local.train().losses) == steps
