"""Unusual mini-batches end to end. tests/group/test_micro_batches.py tests their bits."""

from __future__ import annotations

import itertools
import queue
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcmp.config import loader
from rpcmp.data.loader_pool import LoaderPool
from rpcmp.pipelining import pytree
from rpcmp.rpc.messages import BatchIndices
from tests.support import minibatches
from tests.support.forkedcall import in_a_fork
from tests.support.places import ZOO
from tests.support.processes import JobFolder, rpcmp
from tests.support.samplekinds import MADE


def test_a_mini_batch_that_is_too_small_is_refused_before_the_first_step(job: JobFolder) -> None:
    config = job.config("""
        steps = 4
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [data]
        train = { callable = "zoo:regression", kwargs = { samples = 9 } }
        batch_size = 8
        at = "stage"
    """)
    refused = rpcmp("drive", config, "--json")
    assert refused.code == 2
    assert not [event for event in refused.events if event["event"] in ("step", "fault")]
    assert (
        "the last mini-batch of an epoch has 1 sample (data.batch_size = 8), and a micro-batch "
        "needs 2, since stage 'stage0' trains batch normalization: set data.drop_last = true"
    ) in " ".join(refused.err.split())


def test_stages_that_sample_and_collate_have_the_bits_of_one_process(job: JobFolder) -> None:
    text = MADE["padded"].replace("[data]", '[data]\nbatch_size = 7\nat = "stage"\nnum_workers = 2')
    proved = rpcmp("verify", job.config(text), "--steps", "9")
    assert "identical: 9 losses" in proved.out, proved.err


def require_equal(found: Any, expected: Any) -> None:
    """Fail unless two trees of tensors are equal to the last bit."""
    assert pytree.describe(found) == pytree.describe(expected)
    pairs = zip(pytree.tensors(found), pytree.tensors(expected), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("name", MADE)
def test_loader_processes_of_a_stage_load_the_same_samples(job: JobFolder, name: str) -> None:
    text = MADE[name].replace("[data]", '[data]\nbatch_size = 7\nat = "stage"\nnum_workers = 2')
    in_a_fork(require_that_loaders_load, str(job.config(text)))


def require_that_loaders_load(path: str) -> None:
    """Check that a stage's loaders load the same samples as this process, which forks them."""
    sys.path.insert(0, str(ZOO))
    config = loader.load_config(Path(path))
    section = config.require_data("training")
    here = section.model_copy(update={"at": "driver", "num_workers": 0})
    alone = minibatches.load_batches(here.train, "data.train", here, config.seed, training=True)
    loaders = LoaderPool(config, "stage0")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        loaders.holding()
        if section.sampler is not None:
            loaders.order(1, answers.put)
            alone._order._sampler.set_epoch(1)
            assert answers.get(timeout=30).tolist() == list(alone._order._sampler)
        alone._order.start_epoch(2)
        keys = list(itertools.islice(alone._order, 3))
        for number, (key, loaded) in enumerate(zip(keys, alone.epoch(2), strict=False), start=1):
            batch = dict(zip(("input", "target"), loaded, strict=True))
            loaders.load(BatchIndices(number, "train", *key), answers.put)
            for reference, part in answers.get(timeout=30).trees.items():
                require_equal(part, pytree.select(batch[reference.producer], reference.path))
    finally:
        loaders.close()
