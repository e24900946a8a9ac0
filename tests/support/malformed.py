"""Malformed data for what reads it in a process: a cut's graph, a driver's record, a snapshot.

    python -m tests.support.malformed KIND SEED COUNT LOG

Each input is a valid one with a few changes. The process may crash, so the input is in LOG before
it is read. An error that is not among those that the reader names is printed, and ends it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rpcmp.checkpoint.slots import Slots
from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.errors import RpcmpError
from rpcmp.job import takeover
from rpcmp.job.driver_record import why_not_invited
from rpcmp.net.security import Security
from rpcmp.observability.events import SummaryEvent
from rpcmp.server.snapshot_store import save_snapshot
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import Split
from rpcmp.splitting.weights import tensors_of
from rpcmp.v1 import control_pb2 as pb
from tests.support.splitmodules import CASES, split_of

MEMORY = 8 * 2**30

NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 1e308, float("nan"), float("inf"), True, False)
TEXTS = ("", "a" * 10_000, "../x", "\0", "é", "__class__", "aten.add.Tensor", "float32", '"); x("')


class Changes:
    """Draws changes of JSON."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def changed(self, value: Any) -> Any:
        """Return a copy with some changes."""
        made = copy.deepcopy(value)
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            made = self._once(made)
        return made

    def _once(self, value: Any) -> Any:
        draw = self.random
        if isinstance(value, dict) and value and draw.random() < 0.9:
            key = draw.choice([*value])
            what = draw.random()
            if what < 0.05:
                del value[key]
            elif what < 0.1:
                value[draw.choice(TEXTS)] = self._value()
            else:
                value[key] = self._once(value[key])
            return value
        if isinstance(value, list) and value and draw.random() < 0.9:
            index, what = draw.randrange(len(value)), draw.random()
            if what < 0.05:
                del value[index]
            elif what < 0.1:
                value.insert(index, self._value())
            elif what < 0.15:
                value[index] = copy.deepcopy(draw.choice(value))
            elif what < 0.2:
                other = draw.randrange(len(value))
                value[index], value[other] = value[other], value[index]
            else:
                value[index] = self._once(value[index])
            return value
        return self._value()

    def _value(self) -> Any:
        draw = self.random
        return draw.choice(
            [
                None,
                draw.choice(NUMBERS),
                draw.choice(NUMBERS),
                draw.choice(TEXTS),
                [draw.choice(NUMBERS)] * draw.choice([0, 1, 3, 1000]),
                {draw.choice(("of", "dtype", "float", "slice", "device", "x")): draw.choice(TEXTS)},
                _nested(draw.choice([3, 150])),
            ]
        )

    def bytes_of(self, data: bytes) -> bytes:
        """Return bytes with some of them changed, cut off or repeated."""
        draw, made = self.random, bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(made)) if made else 0
            match draw.randrange(4):
                case 0 if made:
                    made[at] = draw.randrange(256)
                case 1:
                    del made[at:]
                case 2:
                    made[at:at] = draw.randbytes(draw.choice([1, 8, 1000]))
                case _:
                    made[at : at + 8] = draw.choice([b"\xff" * 8, bytes(8), b"[" * 8])
        return bytes(made)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def read_graph(changes: Changes) -> Callable[[], None]:
    """Return what builds and runs the layers of a changed cut, as a host without code does."""
    name = changes.random.choice([*CASES])
    module, split = split_of(name)
    text = json.dumps(changes.changed(json.loads(split.model_dump_json())))
    inputs = CASES[name][1](4, 8)

    def read() -> None:
        found = Split.model_validate_json(text)
        tensors = tensors_of(copy.deepcopy(module))
        value: Any = inputs
        for index in range(min(len(found.layers), 8)):
            layer = SplitLayer(found, index, tensors).train(changes.random.random() < 0.5)
            value = layer(value)
        for each in value if isinstance(value, tuple) else [value]:
            if isinstance(each, torch.Tensor) and each.requires_grad and each.numel():
                each.sum().backward()

    read.__doc__ = text
    return read


def read_record(changes: Changes) -> Callable[[], None]:
    """Return what reads changed answers to Recall, and a server's word of who joins."""
    about = takeover.About(
        run="a",
        run_folder="",
        addresses=["127.0.0.1:1", "127.0.0.1:2"],
        numbers=[0, 1],
        layers={"stage0": ["x"], "stage1": ["y"]},
        shares={},
        config={},
    )
    state = {"step": 3, "loss": 0.5, "epoch": 1, "metrics": {}, "best": None}
    summary = SummaryEvent(
        steps=9,
        is_cut_short=False,
        loss=0.5,
        metrics={"a": 1.0},
        parameters_sha256="00",
        hosts={},
        memory={},
    ).to_json()
    answers = {}
    for place in "12":
        step = changes.random.choice([3, 3, 0, 2**63])
        valid = about.model_dump(), state, summary
        texts = [json.dumps(changes.changed(each)) for each in valid]
        completed = pb.CompletedRun(
            job="job", about=about.model_dump_json(), summary=texts[2], identity="i"
        )
        answer = pb.RecallResponse(
            job="job",
            job_id="a",
            generation=changes.random.choice([1, 2**63]),
            about=texts[0],
            states=[pb.DriverState(step=step, state=texts[1])],
            completed=completed,
        )
        answers[f"127.0.0.1:{place}"] = answer
    data = changes.bytes_of(next(iter(answers.values())).SerializeToString())
    config = Config.model_validate({"loss": "torch.nn:MSELoss", "model": {"layers": "m:layers"}})
    config = config.model_copy(update={"name": "job"})

    def read() -> None:
        with contextlib.suppress(Exception):  # protobuf's own error, before any of ours reads it
            answers["127.0.0.1:3"] = pb.RecallResponse.FromString(data)
        lost = takeover._newest(config, takeover._jobs(config, answers), answers)
        if lost is not None:
            lost.about.apply_to(config)
        takeover._completed(config, answers, "i")
        why_not_invited("a", pb.JoinRequest(address="x" * 1000), Security())

    read.__doc__ = repr(answers)
    return read


def read_snapshot(changes: Changes) -> Callable[[], None]:
    """Return what writes changed memory of a snapshot into a checkpoint."""
    from rpcmp.checkpoint.files import beneath

    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "__metadata__": {"rpcmp": json.dumps({"groups": [], "scheduler": None})},
        }
    ).encode()
    data = changes.bytes_of(len(header).to_bytes(8, "little") + header + bytes(16))
    length = changes.random.choice([len(data), len(data), len(data) + 1, 2**40, 0])

    def read() -> None:
        slots = Slots.create()
        try:
            os.pwrite(slots.fd(0), data, 0)
            snapshot = slots.commit(0, 1, length)
            place = beneath(Path("/tmp"), f"/tmp/rpcmp-malformed-{os.getpid()}")
            save_snapshot(slots, snapshot, "a", place)
        finally:
            slots.close()

    read.__doc__ = repr(data)
    return read


KINDS: dict[
    str, tuple[Callable[[Changes], Callable[[], None]], tuple[type[BaseException], ...]]
] = {
    # A forward fails as a user's may: torch's own errors, of any kind.
    "graph": (read_graph, (Exception,)),
    "record": (read_record, (RpcmpError,)),
    "snapshot": (read_snapshot, (RpcmpError,)),
}


def main(kind: str, seed: int, count: int, log: Path) -> None:
    make, known = KINDS[kind]
    changes, passed = Changes(seed), 0
    importing.set_allow_list([])
    with log.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for _ in range(count):
            read = make(changes)
            file.seek(0)
            file.truncate()
            file.write(read.__doc__ or "")
            file.flush()
            with contextlib.suppress(*known):
                read()
                passed += 1
    print(json.dumps({"read": count, "passed": passed}))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    kind, seed, count, log = sys.argv[1:]
    main(kind, int(seed), int(count), Path(log))
