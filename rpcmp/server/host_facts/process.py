"""The part of an examination that needs torch and the user's code; the process ends with it.

supervisor ──examine──> device tried out, callables imported, code hashed ──examined──> supervisor
"""

from __future__ import annotations

import sys

import torch

from rpcmp.config import importing
from rpcmp.config.user_code import COMPARED_BY_VERSION, sha256_of
from rpcmp.errors import FactoryError, one_line
from rpcmp.metrics import keeps_state
from rpcmp.pipelining import devices
from rpcmp.process import task
from rpcmp.process.channel import Channel, Message
from rpcmp.server.host_facts.facts import CheckRequest, Device


def run(channel: Channel) -> None:
    """Do what the supervisor asks for; the process ends here."""
    task.run_task(channel, _examine)


def _examine(message: Message) -> Message:
    if message["code_folder"]:
        sys.path.insert(0, message["code_folder"])
    importing.limit(message["allowed"])
    order = CheckRequest.model_validate_json(message["order"])
    problems = {key: _problem(name, key) for key, name in order.callables.items()}
    return {
        "event": "examined",
        "devices": {name: _device(name).model_dump() for name in order.devices},
        "problems": {key: problem for key, problem in problems.items() if problem},
        "code": _hashes(order, problems),
        "driver_metrics": [key for key, name in order.metrics.items() if _keeps_state(name, key)],
    }


def _problem(name: str, key: str) -> str:
    """Why a callable cannot be had; empty where it can."""
    try:
        importing.resolve(name, key)
    except FactoryError as error:
        return str(error)
    except BaseException as error:  # a module that calls sys.exit()
        return f"{key} = {name!r} does not import: {one_line(error)}"
    return ""


def _keeps_state(name: str, key: str) -> bool:
    """Whether a metric is the driver's; one that does not import here is the sink's."""
    try:
        return keeps_state(importing.resolve(name, key))
    except BaseException:
        return False


def _hashes(order: CheckRequest, problems: dict[str, str]) -> dict[str, str]:
    """Of rpcmp, and of what could be imported."""
    imported = [name for key, name in order.callables.items() if not problems[key]]
    tops = {"rpcmp", *(name.partition(":")[0].partition(".")[0] for name in imported)}
    return {top: sha256_of(top) for top in sorted(tops.difference(COMPARED_BY_VERSION))}


def _device(name: str) -> Device:
    try:
        device = devices.resolve_device(name)
        torch.ones(2, device=device).sum().item()
        return Device(
            name=devices.device_name(device), available_bytes=devices.available_bytes(device)
        )
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        return Device(problem=one_line(error))
