"""Which mini-batches a dataset of `[data]` gives."""

from __future__ import annotations

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.data.batches import Batches
from rpcmp.data.loading import evaluation_batches, training_batches
from rpcmp.data.streams import StreamBatches, StreamPass
from rpcmp.errors import ConfigError

INDEXED = "tests.zoo.models:dataset"
STREAM = "tests.zoo.streams:Plain"


@pytest.mark.parametrize(
    ("source", "train", "test"),
    [
        (INDEXED, Batches, Batches),
        (STREAM, StreamBatches, StreamPass),
    ],
)
def test_the_kind_of_a_dataset_decides(source: str, train: type, test: type) -> None:
    data = {"train": source, "test": source}
    job = {"loss": "m:loss", "model": {"layers": "m:layers", "num_stages": 2}, "steps": 3}
    config = parse_config({**job, "data": data})
    assert type(training_batches(config)) is train
    assert type(evaluation_batches(config)) is test
    assert evaluation_batches(parse_config({**job, "data": {"train": source}})) is None
    with pytest.raises(ConfigError, match="measuring"):
        training_batches(parse_config(job), "measuring")
