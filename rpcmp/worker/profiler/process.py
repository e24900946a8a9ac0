"""One of two errands, and the end.

supervisor ──sample──> the driver's host: the layers' number, a micro-batch ──sampled──> supervisor
           ──profile─> a stage's host: every layer, run with it            ──profiled──> supervisor
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.data.batches import load_batches
from rpcmp.errors import ConfigError
from rpcmp.pipelining import layers, microbatch
from rpcmp.pipelining.layer_profile import ProfileOrder
from rpcmp.process import task
from rpcmp.process.channel import Channel, Message
from rpcmp.rpc import tensors
from rpcmp.worker import weight_grad
from rpcmp.worker.profiler.layers import measure

MAX_SAMPLE = 32 * 2**20
"""Bytes of a micro-batch; with its encoding it has to fit into a message."""


def run(channel: Channel) -> None:
    """Do what the supervisor asks for; the process ends here."""
    task.run_task(
        channel, lambda order: _sample(order) if order["op"] == "sample" else _profile(order)
    )


def _sample(order: Message) -> Message:
    """How many layers there are, and the first micro-batch of the first epoch."""
    folder = Path(order["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(order["config"]).with_folder(folder)
    count = config.num_stages if config.model is None else len(layers.chain_layers(config))
    section = config.require_data("measuring layers")
    batches = load_batches(section.train, "data.train", section, config.seed, training=True)
    batch = next(batches.epoch(1))
    batches.close()
    sample = tensors.dump_message(microbatch.split(batch, config.num_microbatches)[0])
    if len(sample) > MAX_SAMPLE:
        raise ConfigError(
            f"a micro-batch of {format_size(len(sample))} is too large to measure with, which "
            f"takes up to {format_size(MAX_SAMPLE)}: use more micro-batches, or measure nothing (a "
            "list as `balance`, `rpcmp explain --no-measure`)"
        )
    encoded = base64.b64encode(sample).decode()
    return {"event": "sampled", "num_layers": count, "sample": encoded}


def _profile(message: Message) -> Message:
    if message["code_folder"]:
        sys.path.insert(0, message["code_folder"])
    importing.limit(message["allowed"])
    weight_grad.install()  # before the user's code is imported: weight gradients are timed apart
    sample = tensors.load_message(base64.b64decode(message["sample"]))
    found = measure(ProfileOrder.model_validate_json(message["order"]), *sample)
    return {"event": "profiled", "profile": found.model_dump()}
