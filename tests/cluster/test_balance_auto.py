"""The automatic balance end to end: measured, chosen and trained, with the same bits."""

from __future__ import annotations

import re
import signal

import pytest

from rpcmp.v1 import control_pb2 as pb
from tests.support.places import EXAMPLES
from tests.support.planning import shorten_rehearsals
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, connect, describe, poll_for, rpcmp, running


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rehearsals(monkeypatch)


LOPSIDED = """
    schedule = "zero-bubble"
    [model]
    layers = "zoo:lopsided"
    balance = "auto"
    num_stages = 3
    [data]
    train = { callable = "zoo:slow_regression", kwargs = { milliseconds = 10 } }
    batch_size = 10
"""

TWO = """
    [model]
    layers = "zoo:lopsided"
    kwargs = {{ milliseconds = {milliseconds} }}
    balance = "auto"
    num_stages = 2
"""


@pytest.mark.cluster
def test_a_layer_as_slow_as_all_others_gets_its_own_stage(job: JobFolder) -> None:
    result = rpcmp("drive", job.config(LOPSIDED), "--json")
    assert result.code == 0, result.err
    plan, summary = result.event("plan"), result.event("summary")
    assert plan["balance"] == summary["plan"]["balance"] == [2, 1, 2]
    # Four micro-batches sleep 30 ms twice each; of steps that overlap, one may look a bit shorter.
    assert summary["plan"]["measured_step_s"] >= 0.9 * 0.24
    assert plan["step_s"] == summary["plan"]["predicted_step_s"] >= 0.24
    assert plan["stages"]["stage1"]["bubble"] < plan["stages"]["stage0"]["bubble"]
    assert plan["is_rehearsed"]
    assert plan["loading_s"] > 0.1  # of ten samples
    assert all(stage["messages_s"] > 0 for stage in plan["stages"].values())
    assert all(0 < s["memory_bytes"] < s["limit_bytes"] for s in plan["stages"].values())


WARMED_UP = """
    scheduler_interval = "step"
    [model]
    layers = "zoo:mlp"
    balance = "auto"
    num_stages = 2
    [optimizer]
    callable = "torch.optim:SGD"
    kwargs = { lr = 1e30 }
    [scheduler]
    callable = "torch.optim.lr_scheduler:ConstantLR"
    kwargs = { factor = 1e-32, total_iters = 1000 }
"""


def test_what_a_rehearsal_meets_without_schedulers_ends_no_run(job: JobFolder) -> None:
    config = job.config(WARMED_UP)
    result = rpcmp("drive", config, "--json")
    assert result.code == 0, result.err
    assert not result.event("plan")["is_rehearsed"]
    warnings = [event["text"] for event in result.events if event["event"] == "warning"]
    assert any("predicted by the layers alone: " in text for text in warnings)


def test_long_lived_servers_measure_and_then_train(job: JobFolder) -> None:
    config = job.config(TWO.format(milliseconds=1))
    with lend_servers(2) as servers:
        result = rpcmp("verify", config, "--steps", "2", "--connect", connect(servers))
    assert result.code == 0, result.err
    assert "identical: 2 losses" in result.out


def test_a_run_starts_under_the_options_that_are_predicted_to_be_the_fastest() -> None:
    few = ("--steps", "5", "--set", "model.balance=auto")
    result = rpcmp("drive", EXAMPLES / "digits.toml", "--json", *few)
    assert result.code == 0, result.err
    assert result.event("plan")["is_rehearsed"]
    (start,) = [event for event in result.events if event["event"] == "schedule"]
    assert (start["step"], start["measured"]) == (0, {})
    assert start["chosen"] != "1f1b"  # these layers are tiny, so messages cost most
    assert result.event("summary")["plan"]["measured_step_s"] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_stages=6", "6 stages need at least as many layers, but the model has 5"),
        ('stages=[{ memory = "1 MiB" }, {}, {}]', "stage 'stage0' needs .* and may have 1.0 MiB"),
        ("model.kwargs.milliseconds=nothing", "layer 'sleeper' failed to build: TypeError"),
    ],
)
def test_a_model_that_cannot_be_balanced_is_refused_before_training(
    job: JobFolder, override: str, message: str
) -> None:
    result = rpcmp("drive", job.config(LOPSIDED), "--set", override)
    assert result.code == 2
    assert re.search(message, result.err), result.err
    assert result.out == "measuring the hosts before the first step\n"


@pytest.mark.cluster
def test_a_server_is_free_again_after_its_driver_dies(job: JobFolder) -> None:
    config = job.config(TWO.format(milliseconds=60_000))
    with (
        lend_servers(2) as servers,
        running("drive", config, "--connect", connect(servers)) as drive,
    ):
        poll_for(
            lambda: describe(servers[0]).state == pb.SERVER_STATE_PROFILING,
            "the first server to measure",
        )
        busy = rpcmp("drive", config, "--connect", connect(servers), "--set", "model.balance=[1,4]")
        assert busy.code == 75
        assert "busy measuring for job 'job'" in busy.err
        drive.process.send_signal(signal.SIGKILL)
        poll_for(
            lambda: describe(servers[0]).state == pb.SERVER_STATE_IDLE, "the server to be free"
        )
