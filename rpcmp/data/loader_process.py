"""A process that loads samples for a stage: it builds the datasets, then answers requests.

    worker ──which samples──> process ──sizes; parts of a mini-batch; an error──> worker

Answers are tensors in shared memory, and a pickle of the trees that they belong to, since a batch
may contain the user's own named tuples. The worker trusts this process, which it has forked.
"""

from __future__ import annotations

import functools
import os
import pickle
import platform
import signal
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from setproctitle import setproctitle

from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES, Reference
from rpcmp.data import batches
from rpcmp.data.batches import Collate, OwnSampler, Samples, sampler_of
from rpcmp.errors import ConfigError, RpcmpError, StageError, one_line, to_wire
from rpcmp.pipelining import pytree
from rpcmp.process.channel import die_with_parent
from rpcmp.rpc.tensors import Handoff

Message = dict[str, Any]

Parts = dict[Reference, Any]
"""What a stage reads of a mini-batch: a tree of tensors per reference."""


def serve(handoff: Handoff, parent_pid: int, config: Config, stage: str) -> NoReturn:
    """Answer the worker, whose process id is `parent_pid`, until it is gone; then exit."""
    die_with_parent(parent_pid, signal.SIGKILL)
    setproctitle("rpcmp.data.batches")
    torch.set_num_threads(1)
    loading = _Loading(config, stage)
    answer = loading.build()
    while True:
        try:
            _send(handoff, answer, stage)
            request = handoff.receive()
            is_order = len(request) == 1
            answer = loading.order(*request) if is_order else loading.load(*request)
        except (OSError, EOFError):
            os._exit(0)


def _send(handoff: Handoff, answer: Message, stage: str) -> None:
    try:
        handoff.send(answer)
    except (OSError, EOFError):
        raise
    except Exception as error:  # a tensor cannot be handed over, and nothing was sent
        handoff.send(_stage_error(stage, error))


def unpacked(references: Sequence[Reference], answer: Message) -> Parts:
    """Return the parts of a mini-batch in a process's answer."""
    leaves = iter(answer["leaves"])
    trees = pickle.loads(bytes.fromhex(answer["trees"]))
    parts = pytree.map_leaves(lambda _: next(leaves), trees)
    return dict(zip(references, parts, strict=True))


class _Loading:
    def __init__(self, config: Config, stage: str) -> None:
        self._config = config
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._samples: dict[str, Samples] = {}

    def build(self) -> Message:
        section, sizes = self._config.require_data("loading samples at a stage"), {}
        try:
            for name, source in section.factories.items():
                dataset = batches.create_dataset(source, f"data.{name}", self._config.seed)
                self._samples[name] = Samples(dataset, self._config.seed, Collate(section.collate))
                sizes[name] = len(self._samples[name])
        except Exception as error:
            return _config_error(error)
        return {"sizes": sizes}

    def order(self, epoch: int) -> Message:
        try:
            self._sampler.set_epoch(epoch)
            return {"indices": torch.tensor(self._sampler.indices(), dtype=torch.int64)}
        except Exception as error:
            return _config_error(error)

    @functools.cached_property
    def _sampler(self) -> OwnSampler:
        # Created on first use, since only one process of a job draws an order.
        section = self._config.require_data("sampling")
        sampler = sampler_of(self._samples["train"].dataset, section, self._config.seed)
        if sampler is None:
            raise ConfigError("the job has no data.sampler")
        return sampler

    def load(self, dataset: str, epoch: int, index: int, samples: list[int]) -> Message:
        try:
            loaded = self._samples[dataset].load((epoch, index, samples))
            batch = dict(zip(SOURCES, loaded, strict=True))
            parts = [_select(batch, reference) for reference in self._references]
        except RpcmpError as error:
            return {"error": to_wire(error)}
        except BaseException as error:  # also sys.exit() in the user's code
            return _stage_error(self._stage, error)
        trees = pytree.map_leaves(lambda _: None, parts)
        return {"trees": pickle.dumps(trees).hex(), "leaves": list(pytree.leaves(parts))}


def _config_error(error: Exception) -> Message:
    text = str(error) if isinstance(error, RpcmpError) else explain_error(error)
    return {"error": to_wire(ConfigError(f"on {platform.node()}: {text}"))}


def _stage_error(stage: str, error: BaseException) -> Message:
    text = "".join(traceback.format_exception(error))
    return {"error": to_wire(StageError(stage, "data", one_line(error), text))}


def _select(batch: dict[str, Any], reference: Reference) -> Any:
    try:
        return pytree.select(batch[reference.producer], reference.path)
    except LookupError as error:
        raise ConfigError(f"a stage reads {str(reference)!r}: {error}") from error
