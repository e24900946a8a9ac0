"""A run that is interrupted: what it saves, and what it says."""

from __future__ import annotations

import signal

from rpcmp.job.training_run import TrainingRun
from rpcmp.process.fork_client import Forks
from tests.support.graphs import chain_of


def run_of(**more: object) -> TrainingRun:
    config = chain_of(2, data={"train": "m:train"}, **more)
    return TrainingRun(config, None, lambda event: None, "fresh", Forks([]))


def test_a_ctrl_c_saves_only_what_the_config_wants_saved() -> None:
    plain, saving = run_of(), run_of(checkpoint={"dir": "saved"})
    assert [run.saves_on(signal.SIGINT) for run in (plain, saving)] == [False, True]
    assert [run.saves_on(signal.SIGTERM) for run in (plain, saving)] == [True, True]


def test_a_run_that_has_not_begun_names_the_signal_that_ended_it() -> None:
    run = run_of()
    run.signals.append(signal.SIGTERM)
    assert run.step == 0
    assert "SIGTERM" in str(run.interruption())
