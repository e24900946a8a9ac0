"""Layers that move between stages while a run trains: it ends with the bits of one that stays.

What else may happen meanwhile is in tests/controlplane/test_moving_layers.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rpcmp.observability.events import Event, RebalanceEvent, StepEvent
from tests.support.faults import committed, drive
from tests.support.lan import issue, serving
from tests.support.processes import JobFolder
from tests.support.rebalanced import moved, train

CHAIN = """
steps = 40
num_microbatches = 3
max_grad_norm = 0.5
scheduler_interval = "step"
optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
rebalance = "auto"
[model]
layers = "zoo:mlp"
balance = [4, 1, 1]
kwargs = { blocks = 5 }
"""

EPOCHS = """
steps = 16
evaluate_every = 1
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.01, momentum = 0.9 } }
scheduler = { callable = "torch.optim.lr_scheduler:ExponentialLR", kwargs = { gamma = 0.9 } }
rebalance = "auto"
[recovery]
mirror_every_steps = 3
[loss_scaling]
initial = 1024.0
growth_interval = 3
[model]
layers = "zoo:mlp"
balance = [4, 1, 1]
kwargs = { blocks = 5 }
[data]
train = { callable = "zoo:regression", kwargs = { samples = 12 } }
test = "zoo:regression"
batch_size = 4
"""
"""An epoch has three steps, so a pause may come right after an evaluation."""

REPLICAS = CHAIN.replace("[4, 1, 1]", "[4, 2]") + 2 * "[[stages]]\nreplicas = 2\n"

OTHER, FIRST = [1, 4, 1], [4, 1, 1]


@pytest.mark.parametrize(
    ("text", "first", "other"),
    [
        pytest.param(CHAIN, FIRST, OTHER, id="chain"),
        pytest.param(EPOCHS, FIRST, OTHER, id="epochs", marks=pytest.mark.cluster),
        pytest.param(REPLICAS, [4, 2], [2, 4], id="replicas", marks=pytest.mark.cluster),
    ],
)
def test_layers_move_between_two_steps_with_the_same_bits(
    job: JobFolder, text: str, first: list[int], other: list[int]
) -> None:
    config = job.config(text)
    result = train(config, {2: other, 5: first})
    assert moved(result) == [("moved", other, first), ("moved", first, other)]
    assert committed(result) == committed(drive(config))


@pytest.mark.cluster
def test_a_state_that_fits_no_other_cut_is_undone(job: JobFolder) -> None:
    lines = [line for line in CHAIN.splitlines() if not line.startswith("scheduler")]
    config = job.config("\n".join(lines).replace("torch.optim:AdamW", "ownoptimizers:Around"))
    result = train(config, {4: OTHER})
    assert moved(result) == [("undone", FIRST, OTHER)]
    assert "fits no other cut" in result.event("rebalance")["reason"]
    assert committed(result) == committed(drive(config))


SLOWED = 50

PACED = """
steps = 400
schedule = "1f1b"
rebalance = "auto"
[model]
layers = "paced:layers"
balance = [3, 3]
kwargs = {{ folder = "{folder}" }}
[data]
train = "paced:samples"
batch_size = 10
"""
"""Steps of about 75 ms on hosts of equal speed."""


@pytest.mark.cluster
def test_a_host_that_has_become_slower_is_noticed(job: JobFolder) -> None:
    """Others on the machine may have had an effect before; the last change is the one for that."""
    folder = job.folder / "slowness"
    folder.mkdir()

    def slow_down(event: StepEvent) -> None:
        if event.step == SLOWED:
            (folder / "stage1:0").write_text("3.0")

    def is_noticed(event: Event) -> bool:
        return isinstance(event, RebalanceEvent) and event.step > SLOWED

    config = job.config(PACED.format(folder=folder))
    result = train(config, {}, after_step=slow_down, until=is_noticed)
    *_, change = (event for event in result.events if event["event"] == "rebalance")
    assert change["outcome"] == "moved"
    assert change["balance"][1] < change["before"][1]
    assert "stage 'stage1' computes" in change["reason"]


@pytest.mark.cluster
def test_stages_with_certificates_read_each_others_layers(job: JobFolder, tmp_path: Path) -> None:
    here = "127.0.0.1"
    certs = issue(tmp_path / "certs", here, here, here)
    with contextlib.ExitStack() as started:
        servers = [
            started.enter_context(serving(stage, f"{here}:0", certs)).address for stage in range(3)
        ]
        mine = f"security.certs={certs / 'driver'}"
        result = train(job.config(CHAIN), {4: OTHER}, mine, connect=servers)
    assert moved(result) == [("moved", OTHER, FIRST)]
    assert committed(result) == committed(drive(job.config(CHAIN)))
