"""Bit-identical to one process: the test that catches nearly every mistake."""

from __future__ import annotations

import pytest

from tests.processes import JobFolder, rpcmp

CHAINS = {
    "residual blocks with dropout and batch normalization, clipped, scheduled": """
        num_microbatches = 3
        max_grad_norm = 0.5
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
        [model]
        layers = "zoo:mlp"
        balance = [1, 1, 2]
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
    "tuples, dicts, integers and an unused output; one stage frozen, one with its own rate": """
        optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.1, momentum = 0.9 } }
        [model]
        layers = "zoo:trees"
        balance = [1, 1, 1]
        [[stages]]
        optimizer = { weight_decay = 0.1 }
        [[stages]]
        frozen = true
        [[stages]]
        optimizer = { lr = 0.01 }
    """,
    "an LSTM over integers": """
        loss = "zoo:token_loss"
        [model]
        layers = "zoo:lstm"
        balance = [1, 2]
        [data]
        train = "zoo:tokens"
        batch_size = 13
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
    "a transformer over integers": """
        loss = "zoo:token_loss"
        num_microbatches = 3
        [model]
        layers = "zoo:transformer"
        balance = [2, 2]
        [data]
        train = "zoo:tokens"
        batch_size = 13
    """,
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


@pytest.mark.parametrize("text", CHAINS.values(), ids=CHAINS)
def test_a_chain_gives_the_bits_of_one_process(job: JobFolder, text: str) -> None:
    result = rpcmp("verify", job.config(text), "--steps", "6")
    assert result.code == 0, result.err
    assert "identical: 6 losses" in result.out


@pytest.mark.parametrize(
    "name",
    [
        name if "transformer" in name else pytest.param(name, marks=pytest.mark.long)
        for name in CHAINS
    ],
)
def test_a_chain_whose_backwards_are_split_gives_the_bits_of_one_process(
    job: JobFolder, name: str
) -> None:
    result = rpcmp(
        *("verify", job.config(CHAINS[name]), "--steps", "6"), *("--set", "schedule=zero-bubble")
    )
    assert result.code == 0, result.err
    assert "identical: 6 losses" in result.out


@pytest.mark.parametrize(
    "schedule",
    ["zero-bubble", *(pytest.param(s, marks=pytest.mark.long) for s in ("1f1b", "gpipe"))],
)
def test_a_graph_with_branches_and_skips_gives_the_bits_of_one_process(
    job: JobFolder, schedule: str
) -> None:
    config = job.config(GRAPH)
    result = rpcmp("verify", config, "--steps", "6", "--set", f"schedule={schedule}")
    assert result.code == 0, result.err


def test_a_difference_is_named_and_exits_1(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:impure"\nbalance = [1, 1]')
    result = rpcmp("verify", config, "--steps", "2")
    assert result.code == 1
    assert "step 1: loss" in result.err
