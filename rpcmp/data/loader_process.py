"""A process that loads what a stage reads of each mini-batch.

    worker ──which samples, or an epoch──> process ──sizes; parts, or indices; an error──> worker

It answers with tensors in shared memory, and a pickle of the trees that they belong to, since a
batch may contain the user's own named tuples. The worker trusts it: it has forked it.
"""

from __future__ import annotations

import functools
import os
import pickle
import platform
import signal
import traceback
from typing import Any, NoReturn

import torch
from setproctitle import setproctitle

from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES, Reference
from rpcmp.data import batches, loss_weights
from rpcmp.data.batches import Collate, Loaded, Samples
from rpcmp.data.sample_order import OwnSampler, sampler_of
from rpcmp.data.streams import PassReader, StreamReader
from rpcmp.errors import ConfigError, RpcmpError, StageError, one_line, to_wire
from rpcmp.pipelining import microbatches, pytree
from rpcmp.process.channel import die_with_parent
from rpcmp.rpc.tensors import Handoff

Message = dict[str, Any]


def serve(handoff: Handoff, parent_pid: int, config: Config, stage: str) -> NoReturn:
    """Answer the worker, whose process id is `parent_pid`, until it is gone; then exit."""
    die_with_parent(parent_pid, signal.SIGKILL)
    setproctitle("rpcmp.data.batches")
    torch.set_num_threads(1)
    loading = Loading(config, stage)
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
        handoff.send({"error": to_wire(stage_error(stage, error))})


class Loading:
    """What the process has built: the datasets, and what the sink's loss counts in targets."""

    def __init__(self, config: Config, stage: str) -> None:
        self._config = config
        self._stage = stage
        self._references = config.graph().parts(stage)
        self._samples: dict[str, Samples | StreamReader | PassReader] = {}
        self._weights: loss_weights.LossWeights | None = None

    def build(self) -> Message:
        section = self._config.require_data("loading samples at a stage")
        sizes: dict[str, int] = {}
        try:
            if self._config.weighing and self._config.graph().sink == self._stage:
                self._weights = loss_weights.LossWeights(self._config)
            for name, source in section.factories.items():
                dataset = batches.create_dataset(source, f"data.{name}", self._config.seed)
                made: Samples | StreamReader | PassReader
                if not batches.is_stream(dataset):
                    made = Samples(
                        dataset,
                        self._config.seed,
                        Collate(section.collate, self._config.has_equal_parts),
                    )
                elif name == "train":
                    made = StreamReader(self._config)
                else:
                    made = PassReader(dataset, self._config)
                self._samples[name], sizes[name] = made, len(made)
        except Exception as error:
            return _config_error(error)
        streams = [name for name, made in self._samples.items() if not isinstance(made, Samples)]
        return {"sizes": sizes, "streams": streams}

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
        train = self._samples["train"]
        dataset = train.dataset if isinstance(train, Samples) else None
        sampler = None if dataset is None else sampler_of(dataset, section, self._config.seed)
        if sampler is None:
            raise ConfigError("the job has no data.sampler")
        return sampler

    def load(
        self,
        dataset: str,
        epoch: int,
        index: int,
        samples: list[int],
        num_microbatches: int,
        position: str,
    ) -> Message:
        """Load a mini-batch, which will be cut into `num_microbatches`.

        Args:
            position: where a stream has to go on, if not after the mini-batch before.
        """
        weights: list[float] = []
        try:
            source = self._samples[dataset]
            if isinstance(source, StreamReader) and position:
                source.seek(position)
            loaded = source.load((epoch, index, samples))
            if self._weights is not None and loaded is not None:
                where = f"data.{dataset}, mini-batch {index + 1} of epoch {epoch}"
                targets = microbatches.split(loaded.targets, num_microbatches)
                weights = self._weights.of(targets, where, dataset == "train")
            parts = [_select(loaded, reference) for reference in self._references]
            trees = pickle.dumps(pytree.map_leaves(lambda _: None, parts)).hex()
        except RpcmpError as error:
            return {"error": to_wire(error)}
        except BaseException as error:  # also sys.exit() in the user's code
            return {"error": to_wire(stage_error(self._stage, error))}
        return {
            "trees": trees,
            "leaves": list(pytree.leaves(parts)),
            "weights": weights,
            "position": "" if isinstance(source, Samples) else source.position,
        }


def _config_error(error: Exception) -> Message:
    text = str(error) if isinstance(error, RpcmpError) else explain_error(error)
    return {"error": to_wire(ConfigError(f"on {platform.node()}: {text}"))}


def stage_error(stage: str, error: BaseException) -> StageError:
    """Return the error of the user's code that loads."""
    text = "".join(traceback.format_exception(error))
    return StageError(stage, "data", one_line(error), text)


def _select(loaded: Loaded | None, reference: Reference) -> Any:
    """Return the part of a mini-batch that a stage reads; nothing of one that was read before."""
    if loaded is None:
        return ()
    batch = dict(zip(SOURCES, loaded, strict=True))
    try:
        return pytree.select(batch[reference.producer], reference.path)
    except LookupError as error:
        raise ConfigError(f"a stage reads {str(reference)!r}: {error}") from error
