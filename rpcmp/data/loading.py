"""The datasets of `[data]` as this process loads them: map-style, or streams."""

from __future__ import annotations

from typing import TypeAlias

from rpcmp.config.schema import Config
from rpcmp.data.batches import Batches, create_dataset, is_stream, map_batches
from rpcmp.data.streams import StreamBatches, StreamPass

TrainBatches: TypeAlias = Batches | StreamBatches
EvaluationBatches: TypeAlias = Batches | StreamPass


def training_batches(config: Config, purpose: str = "training") -> TrainBatches:
    """Build `data.train`, and return its mini-batches.

    Args:
        purpose: what needs them, for the error if the config has no `[data]`.

    Raises:
        ConfigError: it has no mini-batch, or is a stream, and the config has settings for others.
    """
    section = config.require_data(purpose)
    dataset = create_dataset(section.train, "data.train", config.seed)
    if is_stream(dataset):  # built again by the processes that read it
        return StreamBatches(config, section.num_workers)
    return map_batches(dataset, "data.train", section, config.seed, True, config.has_equal_parts)


def evaluation_batches(config: Config) -> EvaluationBatches | None:
    """Build `data.test`, if there is one, and return its mini-batches."""
    section = config.require_data("evaluating")
    if section.test is None:
        return None
    dataset = create_dataset(section.test, "data.test", config.seed)
    if is_stream(dataset):
        return StreamPass(dataset, config)
    return map_batches(dataset, "data.test", section, config.seed, False, config.has_equal_parts)
