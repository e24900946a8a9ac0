"""All stages as one model: one call for a train step, an evaluation or a prediction.

Each stage has a part of the model, and this module joins their answers as if there were one
process. See `rounds` for how micro-batches go through the stages.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.batches import Loaded, too_few_samples
from rpcmp.driver import sample_check, worker_refs
from rpcmp.driver.distributed_optimizer import DistributedOptimizer
from rpcmp.driver.evaluation import Evaluation, Metrics, mean
from rpcmp.driver.loss_scaler import LossScaler
from rpcmp.driver.rounds import Batch, RoundHandle, Rounds
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import ConfigError, JobError, RpcmpError, one_line
from rpcmp.pipelining import cost_model, microbatches
from rpcmp.rpc import tensors
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    DatasetInfo,
    Evaluated,
    Mode,
    StageOutputs,
    StepReport,
    Trained,
)
from rpcmp.rpc.transport import Transport, results
from rpcmp.worker.stage import Stage
from rpcmp.worker.state.variables_watch import require_not_shared

log = logging.getLogger(__name__)


class StageGroup:
    """All stages of a job, after every process has joined.

    Train steps may overlap. Everything else waits until no round is in flight.

    Args:
        source: serves mini-batches to the stages.
        peers: the transport of the group.

    Attributes:
        workers: references to the stages, for calls that are not a round.
    """

    def __init__(self, config: Config, source: BatchServer, peers: Transport) -> None:
        self._config = config
        self._peers = peers
        self.workers = WorkerRefs.join(config.workers, peers)
        self._rounds = Rounds(config, source, self.workers)
        graph = config.graph()
        self._readers = [worker for worker in config.workers if graph.parts(worker.stage)]
        self.optimizer = DistributedOptimizer(
            self.workers.parts(Stage.its_optimizer),
            self._sum_gradients,
            self._rounds.abort,
            None if config.loss_scaling is None else LossScaler(config.loss_scaling),
        )
        self._unsummed, self._is_checked = 0, False
        self._sync_initial_state()
        self._needed: dict[str, int] = {}
        if config.data is None or config.data.min_microbatch is None:
            self._needed = self.workers.on_firsts(Stage.smallest_microbatch)
            self._rounds.smallest = max(self._needed.values())

    def _require_independent(self, batch: Loaded) -> None:
        """Check the samples of the first mini-batch, once; see `sample_check`."""
        config, count = self._config, self._rounds.count(batch.num_samples, True)
        is_compared = config.cut is not None and config.cut.uncompared is None
        if config.has_equal_parts and not is_compared and count > 1 and not self._is_checked:
            sample_check.require_independent(
                config, batch, lambda inputs, count, step: self._predictions(inputs, step, count)
            )
        self._is_checked = True

    def tell_statistics(self) -> None:
        """Say in the log that batch normalization does not see whole mini-batches."""
        size, count = self._config.require_data("training").batch_size, self.num_full_microbatches
        if count > 1 and max(self._needed.values(), default=1) > 1:
            log.info(
                "batch normalization takes the statistics of each micro-batch, of %d samples, and "
                "not of the whole mini-batch of %d",
                size // count,
                size,
            )

    def require_enough(self, samples: int) -> None:
        """Check that the run's smallest mini-batch, of `samples`, makes a micro-batch."""
        least = self._rounds.smallest
        if samples < least:
            section = self._config.require_data("training")
            stage = next((name for name, its in self._needed.items() if its > samples), "")
            raise too_few_samples(samples, least, section, stage)

    @property
    def num_full_microbatches(self) -> int:
        """Micro-batches of a full mini-batch, which the stages may need to be fewer and larger."""
        return self._rounds.count(self._config.require_data("training").batch_size, True)

    def warnings(self) -> list[str]:
        """Return warnings if a step has fewer micro-batches than the config asks for."""
        config, section = self._config, self._config.require_data("training")
        merged = section.model_copy(update={"min_microbatch": self._rounds.smallest})
        real = config.model_copy(update={"data": merged})
        count, wanted = self.num_full_microbatches, config.num_full_microbatches
        if count == wanted:
            return []
        fewer = (
            f"{section.batch_size} samples make {count} micro-batches of at least "
            f"{merged.min_microbatch}, and not {wanted}: a stage trains batch normalization; "
            "see data.min_microbatch"
        )
        return [fewer, *real.warnings]

    def reschedule(self, config: Config) -> None:
        """Switch to schedule options that the plan foresaw, between two rounds."""
        self._rounds.reschedule(config)
        limits = cost_model.limits(config)
        self.workers.everywhere(Stage.reschedule, config.options.schedule, limits)
        self._config = config

    def start_step(
        self,
        batch: Batch,
        step: int,
        after: AfterRound,
        version: int = 0,
        save: bool = False,
    ) -> RoundHandle:
        """Start a train step; `finish_step` waits for it.

        Up to STEPS_AHEAD may be in flight; every stage works on them strictly in order.

        Args:
            batch: a mini-batch. If stages load it, `prefetch` must have announced it.
            step: the optimizer step that this is for, counted from 1; seeds dropout. In another
                call for the same step, gradients accumulate and dropout goes on drawing.
            after: what the stages do by themselves afterwards.
            version: the number of the snapshot that they take then; 0: none.
            save: whether that snapshot goes to their disks.
        """
        if step == 1 and isinstance(batch, Loaded):
            self._require_independent(batch)
        started = self._rounds.train(batch, step, after, version, save)
        self._unsummed = started.number if after is AfterRound.NOTHING else 0
        return started

    def finish_step(self, started: RoundHandle) -> Trained:
        """Wait for the earliest train step in flight.

        Raises:
            StageError: the user's code raised at a stage.
            NonFiniteLossError: the loss is NaN or infinite, and not scaled.
            ConfigError: two stages use a variable that only one process may change.
        """
        try:
            trained: list[Trained] = self._rounds.finish(started)
            reports = {name: report for part in trained for name, report in part.reports.items()}
            require_not_shared(reports)
        except (ConfigError, JobError):
            self._clear_gradients()
            raise
        return Trained(microbatches.exact_sum(part.loss for part in trained), reports)

    def end_step(self, started: RoundHandle, loss: float) -> dict[str, StepReport]:
        """Step all optimizers after `finish_step` of a step that is held; return the reports.

        Schedulers that watch the loss get `loss`.

        Raises:
            LossScaleError: too many steps in a row were skipped.
        """
        step = started.header.step
        watched = loss if self._config.steps_scheduler("step") else None
        try:
            self._sum_round(started.number)
            reports = self.optimizer.finish(self._config.max_grad_norm, watched)
        except Exception as error:  # no stage may be left that holds the round
            when = f" at the end of step {step}"
            known = error if isinstance(error, RpcmpError) else unexpected(error, when)
            cause = self._rounds.abort(known, started.number)
            self._clear_gradients()
            raise cause from error
        if self.optimizer.scaler is not None:
            self.optimizer.scaler.require_useful(step)
        return reports

    def step(self) -> None:
        """Update the parameters with the gradients that have been accumulated, and clear these."""
        self.optimizer.step()
        self._rounds.discard()

    def zero_grad(self) -> None:
        self._rounds.discard()
        self._unsummed = 0
        self.optimizer.zero_grad()

    def settle(self) -> dict[str, StepReport]:
        """Wait until all stages are idle; return their reports of the last step.

        Raises:
            StageError: the last step failed in a weight gradient or an optimizer.
        """
        answers = self.workers.everywhere(Stage.settle)
        reports = {name: report for name, report in answers.items() if report is not None}
        require_not_shared(reports)
        return reports

    def evaluate(self, batch: Batch, step: int, own: Metrics | None = None) -> Evaluation:
        """Return the loss and metrics of a mini-batch; changes no parameters or gradients.

        Args:
            step: the optimizer step that this follows.
            own: the driver's metrics, which are updated with every micro-batch, in order.
        """
        started = self._rounds.forward(Mode.EVALUATE, batch, step)
        count = started.header.num_microbatches
        answers: list[Evaluated] = self._rounds.finish(started)
        if own is not None and own.names:
            targets = (
                microbatches.split(batch.targets, count)
                if isinstance(batch, Loaded)
                else [answer.targets for answer in answers]
            )
            for answer, target in zip(answers, targets, strict=True):
                own.update(self._as_returned(answer.outputs), target)
        metas = started.header.microbatches(range(count))
        return mean(
            Evaluation(meta.num_samples, answer.loss, answer.metrics, answer.weight)
            for meta, answer in zip(metas, answers, strict=True)
        )

    def _as_returned(self, outputs: Any) -> Any:
        """Return outputs with the names that a module which was cut gives them in evaluation."""
        if self._config.cut is None:
            return outputs
        from rpcmp.pipelining.split_layers import unpacked  # torch.export, for this alone
        from rpcmp.splitting.exporting import as_returned

        return as_returned(unpacked(self._config.cut).structures[1], outputs)

    def predict(self, inputs: Any, step: int) -> Any:
        """Return the last stage's outputs for `inputs`, joined again along the first dimension."""
        return microbatches.join(self._predictions(inputs, step))

    def _predictions(self, inputs: Any, step: int, count: int | None = None) -> list[Any]:
        """Return the outputs of each micro-batch, of `count` of them."""
        started = self._rounds.forward(Mode.PREDICT, Loaded(inputs), step, count)
        outputs: list[StageOutputs] = self._rounds.finish(started)
        return [output.value for output in outputs]

    def parameters_sha256(self) -> str:
        """Return the hash of `rpcmp.rpc.tensors` over the unsplit model.

        Raises:
            MismatchError: the replicas of a stage are not the same model.
        """
        if self._config.is_replicated:
            worker_refs.require_equal_parameters(self.workers)
        lines = self.workers.merge(Stage.digests)
        for name, first in self._config.other_names.items():
            lines[name] = tensors.renamed_line(lines[first], name)
        return tensors.combine_digests(lines)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the parameters and buffers of the unsplit model; each stage gets its own.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        others = {*self._config.other_names, *self._config.base}
        state = {n: value for n, value in state.items() if n not in others}
        names: dict[str, list[str]] = self.workers.on_firsts(Stage.state_names)
        known = {name for of_stage in names.values() for name in of_stage}
        if known != set(state):
            missing, unknown = sorted(known - set(state)), sorted(set(state) - known)
            raise ConfigError(f"the state misses {missing} and has unknown {unknown}")
        self.workers.start(
            Stage.load_state_dict, lambda worker: [{n: state[n] for n in names[worker.stage]}]
        )()
        self._sync_initial_state()

    def dataset_infos(self) -> dict[str, DatasetInfo]:
        """Return the datasets that stages have built, by label of those that load samples."""
        calls = [
            (worker.label, self.workers.rpc_async(worker, Stage.dataset_info))
            for worker in self._readers
        ]
        pairs = zip(self._readers, results(calls), strict=True)
        return {worker.label: info for worker, info in pairs if info is not None}

    def epoch_order(self, epoch: int) -> torch.Tensor:
        """Return the sample indices of an epoch, counted from 0, by a stage's own sampler."""
        order: torch.Tensor = self.workers.rpc_sync(self._readers[0], Stage.epoch_order, epoch)
        return order

    def prefetch(self, batches: Sequence[BatchIndices]) -> list[tuple[str, Future[Any]]]:
        """Make the stages that read the batch load mini-batches of coming rounds; do not wait.

        Returns:
            For each worker that reads it, its label, and a future of `Stage.prefetch`.
        """
        counted = [
            batch._replace(
                num_microbatches=self._rounds.count(batch.num_samples, batch.dataset == "train")
            )
            if batch.samples
            else batch
            for batch in batches
        ]
        return [
            (worker.label, self.workers.rpc_async(worker, Stage.prefetch, counted))
            for worker in self._readers
        ]

    def live_state(self) -> dict[str, dict[str, int]]:
        """For each stage and the driver, counts of what a step must not leave behind."""
        return {**self.workers.everywhere(Stage.live_state), DRIVER: self._peers.live_state()}

    def close(self) -> None:
        """Make all workers leave the group, and drop the references to them."""
        self._rounds.close()
        self.workers.everywhere(Stage.finish)
        self.optimizer.release()
        self.workers.release()

    def _clear_gradients(self) -> None:
        with contextlib.suppress(RpcmpError):  # a worker that is gone has no gradients
            self.zero_grad()

    def _sync_initial_state(self) -> None:
        if self._config.sums_gradients or self._config.refers_to_parameters:
            worker_refs.require_same_model(self.workers, self._config)
        if self._config.sums_gradients:
            worker_refs.sync_initial_state(self.workers)

    def _sum_gradients(self) -> None:
        """Have workers sum the accumulated gradients, unless they have done so."""
        if self._unsummed:
            self._sum_round(self._unsummed)
            self._unsummed = 0

    def _sum_round(self, round_number: int) -> None:
        if self._config.sums_gradients:
            self.workers.everywhere(Stage.sum_gradients, round_number)


def unexpected(error: Exception, when: str = "") -> JobError:
    """Return the error of a job whose driver raised `error`, which is a bug in rpcmp."""
    text = "".join(traceback.format_exception(error))
    return JobError(f"the driver failed{when}: {one_line(error)}\n{text}")
