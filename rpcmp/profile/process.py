"""One of two errands, and the end.

supervisor ──sample──> the driver's host: the layers' number, a micro-batch ──sampled──> supervisor
           ──profile─> a stage's host: every layer, run with it            ──profiled──> supervisor
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from rpcmp import data, errand, factory, handoff, layers, microbatch, sizes, split
from rpcmp.balance.profile import Order
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.process.channel import Channel, Message
from rpcmp.profile.host import measure

MAX_SAMPLE = 32 * 2**20
"""Bytes of a micro-batch; with its encoding it has to fit into a message."""


def run(channel: Channel) -> None:
    """Do what the supervisor asks for; the process ends here."""
    errand.run(
        channel, lambda order: _sample(order) if order["op"] == "sample" else _profile(order)
    )


def _sample(order: Message) -> Message:
    """How many layers there are, and the first micro-batch of the first epoch."""
    folder = Path(order["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(order["config"]).with_folder(folder)
    count = config.num_stages if config.model is None else len(layers.chain_layers(config))
    section = config.require_data("measuring layers")
    batches = data.load(section.train, "data.train", section, config.seed, training=True)
    batch = next(batches.epoch(1))
    batches.close()
    sample = handoff.dumps(microbatch.split(batch, config.num_microbatches)[0])
    if len(sample) > MAX_SAMPLE:
        raise ConfigError(
            f"a micro-batch of {sizes.show(len(sample))} is too large to measure with, which takes "
            f"up to {sizes.show(MAX_SAMPLE)}: use more micro-batches, or measure nothing (a list "
            "as `balance`, `rpcmp explain --no-measure`)"
        )
    encoded = base64.b64encode(sample).decode()
    return {"event": "sampled", "num_layers": count, "sample": encoded}


def _profile(message: Message) -> Message:
    if message["code_folder"]:
        sys.path.insert(0, message["code_folder"])
    factory.limit(message["allowed"])
    split.install()  # weight gradients are timed by themselves; before the user's code is imported
    sample = handoff.loads(base64.b64decode(message["sample"]))
    found = measure(Order.model_validate_json(message["order"]), *sample)
    return {"event": "profiled", "profile": found.model_dump()}
