"""What a process that loads samples answers; the process itself: test_loader_pool.py."""

from __future__ import annotations

import pickle
from typing import Any

from rpcmp.config.loader import parse_config
from rpcmp.data.loader_process import Loading
from rpcmp.errors import ConfigError, StageError, from_wire


def loading(inputs: str = "input", **section: Any) -> Loading:
    stage = {"name": "only", "module": "m:Module", "inputs": [inputs]}
    data = {"train": "tests.zoo.models:dataset", "at": "stage", **section}
    config = parse_config({"loss": "torch.nn:MSELoss", "stages": [stage], "data": data})
    return Loading(config, "only")


def test_sizes_come_first_and_then_the_parts_that_the_stage_reads() -> None:
    made = loading(test="tests.zoo.models:dataset")
    assert made.build() == {"sizes": {"train": 10, "test": 10}, "streams": []}
    answer = made.load("test", 1, 0, [3, 1], 2, "")
    assert pickle.loads(bytes.fromhex(answer["trees"])) == [None, None]
    inputs, targets = answer["leaves"]
    assert (len(inputs), len(targets)) == (2, 2)
    assert (answer["weights"], answer["position"]) == ([], "")


def test_a_dataset_that_cannot_be_built_is_an_error_of_the_config() -> None:
    error = from_wire(loading(train="tests.zoo.models:raising").build()["error"])
    assert isinstance(error, ConfigError)


def test_an_error_of_the_users_code_has_its_traceback() -> None:
    made = loading()
    made.build()
    error = from_wire(made.load("train", 1, 0, [99], 1, "")["error"])
    assert isinstance(error, StageError)
    assert "IndexError" in str(error)
    assert "Traceback" in error.traceback


def test_an_order_is_that_of_the_jobs_own_sampler() -> None:
    made = loading(sampler="torch.utils.data:SequentialSampler")
    made.build()
    assert made.order(1)["indices"].tolist() == list(range(10))
    without = loading()
    without.build()
    assert "has no data.sampler" in str(from_wire(without.order(1)["error"]))
