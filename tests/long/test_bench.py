"""The real contestants of `rpcmp bench` train the same."""

from __future__ import annotations

import asyncio

import pytest

from rpcmp.errors import UnsupportedJobError
from rpcmp.tools.bench import benchmark, cases, contestants
from rpcmp.tools.bench.contestants import stage_times
from tests.support.contestants import compare
from tests.support.processes import JobFolder

TINY = ["model.kwargs.times_ms={forward = 1.0, input_gradient = 1.0, weight_gradient = 1.0}"]


def test_the_real_peers_train_the_same_from_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contestants, "TRIAL_SECONDS", 0.0)
    case = cases.load("sleep", num_stages=2, num_microbatches=2, overrides=TINY)
    names = ["torch-1f1b", "torch-best", "one-process-1-thread"]
    peers = [contestants.CONTESTANTS[name](case) for name in names]
    done = compare(*peers, pairs=1)
    assert done.unsupported == {}
    assert [one.name for one in done.times] == names
    benchmark.require_equal_losses(done.times)
    losses = done.times[0].losses
    assert len(set(losses)) == len(losses) == benchmark.WARMUP_STEPS + 2
    assert done.times[1].settings["schedule"] in contestants.BEST_SCHEDULES


def test_a_users_chain_is_measured_on_equal_micro_batches(job: JobFolder) -> None:
    chain = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2\n')
    times = asyncio.run(stage_times(cases.load(str(chain), overrides=["data.batch_size=20"])))
    assert [each.forward > 0 and each.total > each.forward for each in times] == [True, True]
    assert times[0].backward == 0.0  # the gradient of the data is never read
    assert times[1].backward > 0
    uneven = cases.load(str(chain), num_microbatches=3)
    with pytest.raises(UnsupportedJobError, match="10 samples do not make 3 equal"):
        asyncio.run(stage_times(uneven))
