"""A message for every method of every service of a stage server, with random content."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from rpcmp.v1 import control_pb2

STEERING = ("Prepare", "Start", "Link", "Watch", "Stop", "Profile", "Inspect", "Mirror", "Save")
"""Methods by which a driver changes or ends a job. They are valid if the sender may drive, and the
message names the running job. `Drain` names no job, and ends any."""


@dataclass
class Job:
    """The running job, as any peer can find out.

    Attributes:
        job_id, generation: its id and its generation.
    """

    job_id: str = ""
    generation: int = 0


class Call(NamedTuple):
    """A call of a method.

    Attributes:
        method: "/package.Service/Method".
        data: its encoded message.
    """

    method: str
    data: bytes


def methods() -> Iterator[MethodDescriptor]:
    """Return all methods of all services."""
    for module in (control_pb2, health_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def calls(draw: random.Random, job: Job, is_driver: bool) -> Iterator[Call]:
    """Yield calls of every method without end; a driver's calls never steer the running job.

    Args:
        job: the job that some messages name.
    """
    every = [method for method in methods() if not (is_driver and method.name == "Drain")]
    while True:
        method = draw.choice(every)
        named = job if draw.random() < 0.5 else Job(draw.randbytes(8).hex(), draw.randrange(9))
        if is_driver and method.name in STEERING:
            named = Job(draw.randbytes(8).hex(), draw.randrange(9))
        data = filled(method.input_type, draw, named).SerializeToString()
        yield Call(f"/{method.containing_service.full_name}/{method.name}", data)


def filled(kind: Descriptor, draw: random.Random, job: Job) -> Message:
    """Return a message with random content, which may name the running job."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if field.name in ("job_id", "generation"):
            setattr(message, field.name, getattr(job, field.name))
        elif field.is_repeated:
            for _ in range(draw.randrange(4)):
                _append(getattr(message, field.name), field, draw, job)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(filled(field.message_type, draw, job))
        elif field.name != "checkpoint_folder":
            setattr(message, field.name, _value(field, draw))
    return message


def _append(values: Any, field: FieldDescriptor, draw: random.Random, job: Job) -> None:
    if field.message_type is not None:
        values.add().CopyFrom(filled(field.message_type, draw, job))
    else:
        values.append(_value(field, draw))


def _value(field: FieldDescriptor, draw: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return draw.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice([0, 1, 100, 10_000]))
        case FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE:
            return draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e300])
        case FieldDescriptor.TYPE_UINT64:
            return draw.choice([0, 1, 2, 2**63, 2**64 - 1])
        case FieldDescriptor.TYPE_UINT32:
            return draw.choice([0, 1, 2**31, 2**32 - 1])
        case FieldDescriptor.TYPE_INT64:
            return draw.choice([0, -1, 2**63 - 1, -(2**63)])
        case _:
            return draw.choice([0, -1, 1, 2**31 - 1])


TEXTS = [
    "",
    "a",
    "stage0",
    "127.0.0.1:1",
    "[::1]:99999999",
    "a\0b",
    "../../etc/passwd",
    "/dev/zero",
    "/" * 300,
    "%s%n{}",
    "\u2028\U0010ffff",
    "x" * 5000,
]
"""Names, addresses and paths, valid and invalid."""
