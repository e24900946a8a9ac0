"""A job that loads samples at the driver or at the stages, for tests/group and tests/cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpcmp.config import loader
from tests.support.faults import committed
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder, Result, rpcmp


def config(job: JobFolder, at: str, mortal: bool = False, **more: Any) -> Path:
    """Write the config of three stages; the middle stage reads nothing from the batch."""
    kwargs = {"witness": str(job.folder / at), **more}
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in kwargs.items())
    return job.config(
        f"""
        epochs = 3
        num_microbatches = 3
        evaluate_every = 2
        [metrics]
        error = "zoo:error"
        worst = "noisy:Worst"
        [[stages]]
        name = "first"
        module = "noisy:Mortal"
        kwargs = {{ marker = {str(job.folder / "died") if mortal else ""!r} }}
        inputs = ["input.0", "input.1.noise"]
        [[stages]]
        name = "middle"
        module = "zoo:Encoder"
        [[stages]]
        name = "last"
        module = "noisy:Head"
        inputs = ["middle", "input"]
        [data]
        train = {{ callable = "noisy:Noisy", kwargs = {{ {given} }} }}
        test = {{ callable = "noisy:Noisy", kwargs = {{ {given}, samples = 13 }} }}
        batch_size = 7
        at = "{at}"
        """.replace("steps = 2", ""),
        f"{at}.toml",
    )


def drive(config: Path, *settings: str) -> Result:
    """Run the job to its end."""
    options = [part for setting in settings for part in ("--set", setting)]
    return rpcmp("drive", config, "--json", "--steps", "10", *options)


def built(job: JobFolder, at: str) -> Counter[str]:
    """Return the number of datasets built, by process."""
    return Counter((job.folder / at).read_text().split())


def evaluations(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the steps and exact results of all evaluations."""
    found = [event for event in events if event["event"] == "eval"]
    return [(event["step"], event["loss"], event["error"], event["worst"]) for event in found]


def require_same_if_one_dies(job: JobFolder, settings: Sequence[str]) -> None:
    """Check that the bits stay the same if the stages load samples and a replica dies.

    The first stage has two replicas, and the last has three. The results must equal a run whose
    driver sends the samples.
    """
    settings = ["stages.0.replicas=2", "stages.2.replicas=3", *settings]
    with local_group(loader.load_config(config(job, "driver"), ["steps=10", *settings])) as local:
        local.train(evaluate=True)
        sent = local.committed()
    loaded = drive(config(job, "stage", mortal=True), *settings)
    assert committed(loaded) == sent
    assert evaluations(loaded.events) == evaluations(local.events)
    assert [event["event"] for event in loaded.events].count("fault") == 1
    datasets, readers, generations = 2, 2 + 3, 2
    assert built(job, "stage") == {"rpcmp.data.batches": datasets * readers * generations}
