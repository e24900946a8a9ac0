"""Layers that move between stages while a run trains: it ends with the bits of one that stays."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rpcmp.observability.events import Event, GenerationEvent, RebalanceEvent, StepEvent
from tests.support.faults import Committed, committed, drive
from tests.support.lan import issue, serving
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder
from tests.support.rebalanced import moved, train

CHAIN = """
steps = 14
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

UNDONE = [("undone", FIRST, OTHER)]


@pytest.mark.parametrize(
    ("text", "first", "other"),
    [(CHAIN, FIRST, OTHER), (EPOCHS, FIRST, OTHER), (REPLICAS, [4, 2], [2, 4])],
    ids=["chain", "epochs", "replicas"],
)
def test_layers_move_between_two_steps_with_the_same_bits(
    job: JobFolder, text: str, first: list[int], other: list[int]
) -> None:
    config = job.config(text)
    result = train(config, {4: other, 9: first})
    assert moved(result) == [("moved", other, first), ("moved", first, other)]
    assert committed(result) == committed(drive(config))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return losses and parameters of CHAIN whose layers stay where they are."""
    return committed(drive(JobFolder(tmp_path_factory.mktemp("stays") / "job").config(CHAIN)))


def kill_worker(event: GenerationEvent) -> None:
    os.kill(event.workers["stage1"]["pid"], signal.SIGKILL)


def kill_server(event: GenerationEvent) -> None:
    """Kill the server of stage1, whose snapshots are lost with it."""
    port = int(event.workers["stage1"]["address"].rpartition(":")[2])
    connections = psutil.net_connections("tcp4")
    listening = {tuple(c.laddr)[1]: c.pid for c in connections if c.status == "LISTEN"}
    server = listening[port]
    assert server is not None
    os.kill(server, signal.SIGKILL)


@pytest.mark.parametrize("strike", [kill_worker, kill_server])
def test_a_fault_before_the_first_step_undoes_the_change(
    job: JobFolder, undisturbed: Committed, strike: Callable[[GenerationEvent], None]
) -> None:
    def strike_second(event: GenerationEvent) -> None:
        if event.generation == 2:
            strike(event)

    result = train(job.config(CHAIN), {4: OTHER}, on_generation=strike_second)
    assert moved(result) == UNDONE
    assert committed(result) == undisturbed


def test_a_balance_that_cannot_be_is_undone_and_says_why(
    job: JobFolder, undisturbed: Committed
) -> None:
    result = train(job.config(CHAIN), {4: [1, 1, 1]})
    assert moved(result) == [("undone", FIRST, [1, 1, 1])]
    assert "has 6 layers" in result.event("rebalance")["reason"]
    assert committed(result) == undisturbed


def test_a_state_that_fits_no_other_cut_is_undone(job: JobFolder) -> None:
    lines = [line for line in CHAIN.splitlines() if not line.startswith("scheduler")]
    config = job.config("\n".join(lines).replace("torch.optim:AdamW", "ownoptimizers:Around"))
    result = train(config, {4: OTHER})
    assert moved(result) == UNDONE
    assert "fits no other cut" in result.event("rebalance")["reason"]
    assert committed(result) == committed(drive(config))


def test_a_fault_after_the_first_step_keeps_the_new_balance(
    job: JobFolder, undisturbed: Committed
) -> None:
    """The servers then hold snapshots of both cuts, and perhaps no step of one of them."""
    killed: list[int] = []

    def kill_later(event: StepEvent) -> None:
        if event.generation == 2 and not killed:
            killed.append(event.step)
            os.kill(places[-1].workers["stage2"]["pid"], signal.SIGKILL)

    places: list[GenerationEvent] = []
    result = train(
        job.config(CHAIN), {4: OTHER}, on_generation=places.append, after_step=kill_later
    )
    assert moved(result) == [("moved", OTHER, FIRST)]
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    assert recovered["step"] >= killed[0] - 1
    assert committed(result) == undisturbed


def test_checkpoints_after_a_change_resume_under_any_balance(
    job: JobFolder, undisturbed: Committed, tmp_path: Path
) -> None:
    config = job.config(CHAIN)
    saves = ("checkpoint.dir=saved", "checkpoint.every_steps=3")
    result = train(config, {4: OTHER}, *saves, "steps=10")
    assert [event["step"] for event in result.events if event["event"] == "checkpoint"] == [
        3,
        6,
        9,
        10,
    ]
    options = [word for setting in saves for word in ("--set", setting)]
    resumed = drive(config, "--resume", *options)
    assert resumed.event("resumed")["step"] == 10
    assert committed(resumed)[1] == undisturbed[1]


SLOWED = 50

PACED = """
steps = 400
schedule = "1f1b"
rebalance = "{rebalance}"
[model]
layers = "paced:layers"
balance = [3, 3]
kwargs = {{ folder = "{folder}", milliseconds = {milliseconds} }}
[data]
train = "paced:samples"
batch_size = 10
"""
"""Steps of about 75 ms on hosts of equal speed."""


def changes_of_slowed(
    job: JobFolder,
    rebalance: str,
    milliseconds: float | list[float] = 2.0,
    connect: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Run a job until it says that its second host has become three times as slow.

    Others on the machine may have had an effect before; the last change is the one for that, unless
    layers had moved as far already.
    """
    folder = job.folder / "slowness"
    folder.mkdir()

    def slow_down(event: StepEvent) -> None:
        if event.step == SLOWED:
            (folder / "stage1:0").write_text("3.0")

    def is_noticed(event: Event) -> bool:
        return isinstance(event, RebalanceEvent) and event.step > SLOWED

    config = job.config(PACED.format(rebalance=rebalance, folder=folder, milliseconds=milliseconds))
    result = train(config, {}, connect=connect, after_step=slow_down, until=is_noticed)
    return [event for event in result.events if event["event"] == "rebalance"]


@pytest.mark.parametrize(("rebalance", "outcome"), [("auto", "moved"), ("suggest", "suggested")])
def test_a_host_that_has_become_slower_is_noticed(
    job: JobFolder, rebalance: str, outcome: str
) -> None:
    *_, change = changes_of_slowed(job, rebalance)
    assert change["outcome"] == outcome
    assert change["balance"][1] < change["before"][1]
    assert "stage 'stage1' computes" in change["reason"]


def test_which_layers_move_is_known_where_hosts_were_measured(job: JobFolder) -> None:
    """The fourth layer takes most of the time: without it, its stage has nothing to give away.

    Layers of equal times would be cut [5, 1]; these not before a host is five times as slow.
    """
    with lend_servers(2) as servers:
        addresses = [server.address for server in servers]
        *_, change = changes_of_slowed(job, "auto", [1, 1, 1, 12, 2, 1], addresses)
    assert change["balance"] == [4, 2]


GROUPED = """
from torch import nn
from torch.distributed import rpc

class Grouped(nn.Linear):
    def forward(self, x):
        rpc.get_worker_info()  # raises where there is no group
        return super().forward(x)

def layers():
    return [(name, lambda: Grouped(4, 4)) for name in ("first", "last")]
"""


def test_a_run_whose_hosts_cannot_be_measured_says_so_and_trains(job: JobFolder) -> None:
    (job.folder / "grouped.py").write_text(GROUPED)
    model = '[model]\nlayers = "grouped:layers"\nbalance = [1, 1]\n'
    config = job.config(f'rebalance = "suggest"\n{model}[data]\ntrain = "paced:samples"')
    with lend_servers(2) as servers:
        result = train(config, {}, connect=[server.address for server in servers])
    names = [event["event"] for event in result.events]
    assert names.index("measuring") < names.index("warning") < names.index("step")
    warning = result.event("warning")["text"]
    assert warning.startswith(
        "the hosts could not be measured, so `rebalance` takes them for equal"
    )
    assert "layer 'first'" in warning


def test_stages_with_certificates_read_each_others_layers(
    job: JobFolder, undisturbed: Committed, tmp_path: Path
) -> None:
    here = "127.0.0.1"
    certs = issue(tmp_path / "certs", here, here, here)
    with contextlib.ExitStack() as started:
        servers = [
            started.enter_context(serving(stage, f"{here}:0", certs)).address for stage in range(3)
        ]
        mine = f"security.certs={certs / 'driver'}"
        result = train(job.config(CHAIN), {4: OTHER}, mine, connect=servers)
    assert moved(result) == [("moved", OTHER, FIRST)]
    assert committed(result) == undisturbed
