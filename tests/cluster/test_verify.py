"""Bit-identical to one process: the test that catches nearly every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import JobFolder, rpcmp

SEQUENCE = """
schedule = "zero-bubble"
loss = "zoo:token_loss"
num_microbatches = 3
[model]
layers = "zoo:sequence"
balance = [2, 2, 2]
[data]
train = "zoo:tokens"
batch_size = 11
"""

CHAINS = {
    "residual blocks with dropout and batch normalization, one computed again, clipped": """
        num_microbatches = 3
        max_grad_norm = 0.5
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
        [model]
        layers = "zoo:mlp"
        balance = [1, 1, 2]
        [[stages]]
        [[stages]]
        recompute = true
        [[stages]]
    """,
    "layers in place and transposed, cut everywhere, 32 in flight": """
        schedule = "gpipe"
        num_microbatches = 32
        [model]
        layers = "zoo:in_place"
        balance = [1, 1, 1, 1]
        [data]
        train = "zoo:regression"
        batch_size = 33
    """,
    "tuples, dicts, integers and an unused output; a stage frozen, two with rules of their own": """
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.1, momentum = 0.9 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
        [model]
        layers = "zoo:trees"
        balance = [1, 1, 1]
        [[stages]]
        optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
        scheduler = "torch.optim.lr_scheduler:LinearLR"
        [[stages]]
        frozen = true
        [[stages]]
        optimizer = { lr = 0.01 }
        scheduler = { gamma = 0.5 }
    """,
    "a CNN with batch normalization, a weight that is used twice": """
        schedule = "zero-bubble"
        max_in_flight = 6
        num_microbatches = 5
        [model]
        layers = "zoo:cnn"
        balance = [1, 2, 3]
        [data]
        train = "zoo:regression"
        batch_size = 23
    """,
    "modes, Python's own generator, an epoch-wise scheduler that watches the loss, two threads": """
        scheduler = "torch.optim.lr_scheduler:ReduceLROnPlateau"
        [model]
        layers = "zoo:half_evaluating"
        num_stages = 2
        [[stages]]
        threads = 2
        [[stages]]
        threads = 2
        [data]
        train = "zoo:regression"
        batch_size = 25
    """,
    "an LSTM and a transformer over integers, a layer in place between them": SEQUENCE,
    "the same, all computed again": SEQUENCE.replace(
        "[data]", "[[stages]]\nrecompute = true\n" * 3 + "[data]"
    ),
}

GRAPH = """
    num_microbatches = 6
    loss = { callable = "torch.nn:MSELoss", kwargs = { reduction = "sum" } }
    optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.001, weight_decay = 0.1 } }
    [[stages]]
    name = "join"
    module = "zoo:Join"
    kwargs = { inputs = 4 }
    inputs = ["left", "root.left", "right", "input"]
    [[stages]]
    name = "root"
    module = "zoo:TwoHeads"
    inputs = ["input"]
    [[stages]]
    name = "left"
    module = "zoo:Encoder"
    kwargs = { scale = 2.0, inputs = 2 }
    inputs = ["root.left", "root.right"]
    [[stages]]
    name = "right"
    module = "zoo:Encoder"
    inputs = ["root.right"]
"""


def verified(config: Path, *overrides: str) -> str:
    """What `rpcmp verify` says of six steps, none of which may be different."""
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("verify", config, "--steps", "6", *options)
    assert result.code == 0, result.err
    return result.out


@pytest.mark.parametrize("text", CHAINS.values(), ids=CHAINS)
def test_a_chain_gives_the_bits_of_one_process(job: JobFolder, text: str) -> None:
    assert "identical: 6 losses" in verified(job.config(text))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("text", CHAINS.values(), ids=CHAINS)
def test_so_it_does_under_other_schedules(job: JobFolder, text: str, schedule: str) -> None:
    assert "identical: 6 losses" in verified(job.config(text), f"schedule={schedule}")


BUNDLES = "microbatches_per_message=2", "max_in_flight=64"

BUNDLED = ("layers in place", "tuples, dicts", "an LSTM")
"""Which of the chains are enough, each day, to tell that bundles leave the bits alone."""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=name, marks=() if name.startswith(BUNDLED) else pytest.mark.long)
        for name, text in CHAINS.items()
    ],
)
def test_so_it_does_when_micro_batches_share_their_messages(job: JobFolder, text: str) -> None:
    assert "identical: 6 losses" in verified(job.config(text), *BUNDLES)


def test_tensors_that_travel_as_bfloat16_make_a_difference_which_is_small_and_said(
    job: JobFolder,
) -> None:
    text = 'wire_dtype = "bfloat16"\n[model]\nlayers = "zoo:mlp"\nbalance = [1, 1, 2]'
    found = verified(job.config(text))
    numbers = re.findall(r"by (?:up to )?(\d\.\de[-+]\d\d)", found)
    assert found.startswith("different, as wire_dtype = 'bfloat16' makes it: losses")
    assert [0 < float(number) < 2**-7 for number in numbers] == [True, True]


@pytest.mark.parametrize(
    "schedule",
    ["zero-bubble", *(pytest.param(s, marks=pytest.mark.long) for s in ("1f1b", "gpipe"))],
)
def test_a_graph_with_branches_and_skips_gives_the_bits_of_one_process(
    job: JobFolder, schedule: str
) -> None:
    assert "identical: 6 losses" in verified(job.config(GRAPH), f"schedule={schedule}")


@pytest.mark.long
def test_so_does_such_a_graph_when_micro_batches_share_their_messages(job: JobFolder) -> None:
    found = verified(job.config(GRAPH), "schedule=zero-bubble", "num_microbatches=5", *BUNDLES)
    assert "identical: 6 losses" in found


def test_a_difference_is_named_and_exits_1(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:impure"\nbalance = [1, 1]')
    result = rpcmp("verify", config, "--steps", "2")
    assert result.code == 1
    assert "step 1: loss" in result.err
