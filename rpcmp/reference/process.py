"""The reference process; its supervisor gives it a worker's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rpcmp import data, host, plan
from rpcmp.config import Config
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.factory import explain
from rpcmp.process.channel import Channel
from rpcmp.reference.training import UnsplitModel
from rpcmp.tensorfile import save_tensors


def run(channel: Channel) -> None:
    """Train the unsplit model once; the process ends here."""
    try:
        _run(channel)
    except Exception as error:
        known = error if isinstance(error, RpcmpError) else JobError(f"reference: {explain(error)}")
        channel.send({"event": "error", "error": to_wire(known)})
        os._exit(1)


def _run(channel: Channel) -> None:
    order = channel.receive()
    if order is None:
        return
    folder = Path(order["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(order["config"]).with_folder(folder)
    section = config.require_data("training the unsplit model")
    batches = data.load(section.train, "data.train", section, config.seed, training=True)
    model = UnsplitModel(config, {part.stage_name: part.layers for part in plan.assign(config)})
    for loss in model.train(batches, order["steps"]):
        channel.send({"event": "step", "loss": loss})
    save_tensors(model.state_dict(), Path(order["save_state"]))
    channel.send({"event": "done", "host": host.facts()})
