"""The reference process; its supervisor gives it a worker's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.data.batches import load_batches
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.pipelining import assignment, devices
from rpcmp.process.channel import Channel
from rpcmp.rpc.tensors import save_tensors
from rpcmp.tools.verify.reference.training import UnsplitModel


def run(channel: Channel) -> None:
    """Train the unsplit model once; the process ends here."""
    try:
        _run(channel)
    except Exception as error:
        known = (
            error
            if isinstance(error, RpcmpError)
            else JobError(f"reference: {explain_error(error)}")
        )
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
    batches = load_batches(section.train, "data.train", section, config.seed, training=True)
    model = UnsplitModel(
        config, {part.stage_name: part.layers for part in assignment.assign(config)}
    )
    for loss in model.train(batches, order["steps"]):
        channel.send({"event": "step", "loss": loss})
    save_tensors(model.state_dict(), Path(order["save_state"]))
    channel.send({"event": "done", "host": devices.host_facts()})
