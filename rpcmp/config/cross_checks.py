"""Check the keys of a configuration against each other, beyond each section's own rules.

Contradictions are refused before anything starts, in errors that name the keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcmp.config import topology
from rpcmp.config.topology import DRIVER
from rpcmp.config.types import Factory
from rpcmp.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from rpcmp.config.job_sections import StageConfig
    from rpcmp.config.schema import Config


RESERVED_METRICS = {"event", "step", "epoch", "time", "generation", "loss"}
"""Keys that the event `eval` has besides the metrics; see rpcmp.observability.events."""


def check(config: Config) -> None:
    """Raise ValueError, which pydantic makes an error of the config, if keys contradict."""
    _check_stages(config)
    _check_tied(config)
    _check_replicas(config)
    _check_metrics(config)
    _check_evaluation(config)
    _check_loss_scaling(config)
    _check_loss_weight(config)
    _check_count(config)
    _check_module(config)
    _check_rebalance(config)


def warnings(config: Config) -> list[str]:
    """Return warnings about replicas that compute nothing of any step."""
    stages = zip(config.stage_names, config.stages, strict=False)
    found = ((name, stage.shares, _idle(config, name)) for name, stage in stages)
    return [
        f"stage {name!r}: {_counted('replica', idle)} will have nothing to do, since a step has "
        f"only {_step(config)}; {_remedy(config, shares)}"
        for name, shares, idle in found
        if idle
    ]


def _num_bundles(config: Config) -> int:
    return len(config.bundles(config.num_full_microbatches))


def _idle(config: Config, stage: str) -> list[int]:
    """Return the replicas of a stage that get no bundle; see rpcmp.config.topology."""
    turns = config.turns_of(stage)
    count = _num_bundles(config)
    return [r for r in range(turns.num_replicas) if not turns.numbers(r, count)]


def _step(config: Config) -> str:
    count = config.num_full_microbatches
    microbatches = f"{count} micro-batch{'es' if count > 1 else ''}"
    if config.options.microbatches_per_message == 1:
        return microbatches
    messages = _num_bundles(config)
    return f"{messages} message{'s' if messages > 1 else ''} of {microbatches}"


def _remedy(config: Config, shares: list[int] | None) -> str:
    is_short = config.num_full_microbatches < config.num_microbatches
    found = ["raise data.batch_size" if is_short else "raise num_microbatches"]
    if config.options.microbatches_per_message > 1:
        found.insert(0, "lower microbatches_per_message")
    if shares:
        found.append("make its shares more equal")
    return " or ".join(found)


def _counted(what: str, numbers: list[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _check_stages(config: Config) -> None:
    if config.model is None and not config.stages:
        raise ValueError("a job needs [model] with a module, or [[stages]] with a module each")
    names = config.stage_names
    for name in names:
        if names.count(name) > 1 or name in (*topology.SOURCES, DRIVER):
            raise ValueError(f"the stage name {name!r} is used twice or is reserved")
    with_address = sum(bool(stage.addresses) for stage in config.stages)
    if with_address not in (0, config.num_stages):
        raise ValueError(
            f"{with_address} of {config.num_stages} stages have addresses; give one to each, or "
            "to none to run all on localhost"
        )
    for index in range(config.num_stages):
        _check_stage(config, names[index], config.stage(index))


def _check_tied(config: Config) -> None:
    for names in config.tied:
        if len(names) < 2:
            raise ValueError(f"tied: {names} names one parameter; name at least two")
    every = [name for names in config.tied for name in names]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise ValueError(
            f"tied: {', '.join(twice)} is named twice; list all names of a parameter together"
        )


def _check_replicas(config: Config) -> None:
    if config.balance_replicas and not config.is_replicated:
        raise ValueError(
            "balance_replicas = true, but no stage has replicas: give one several `addresses`, "
            "or `replicas`"
        )


def _check_stage(config: Config, name: str, stage: StageConfig) -> None:
    if config.model is None and stage.module is None:
        raise ValueError(f"stage {name!r} needs a `module`, or the job a [model]")
    if config.model is not None and (
        stage.module or stage.inputs or stage.kwargs or stage.prefix is not None
    ):
        raise ValueError(
            f"stage {name!r}: `module`, `kwargs`, `prefix` and `inputs` do not go with [model], "
            "whose named layers form a chain"
        )
    if config.scheduler is None and stage.scheduler and not isinstance(stage.scheduler, Factory):
        raise ValueError(
            f"stage {name!r}: `scheduler` gives arguments of the job's scheduler, but the job has "
            "none; give the job a `scheduler`, or the stage one of its own: { callable = ... }"
        )


def _check_metrics(config: Config) -> None:
    if taken := RESERVED_METRICS & set(config.metrics):
        raise ValueError(f"a metric cannot be named {', '.join(map(repr, sorted(taken)))}")
    known = ["loss", *config.metrics]
    for key, watched in config.decisive_metrics.items():
        # Which keys a metric has that gives a dict only the first evaluation shows.
        if watched not in known and not any(watched.startswith(f"{m}.") for m in config.metrics):
            hint = did_you_mean(nearest(watched, known))
            raise ValueError(f"{key} = {watched!r} is not one of {', '.join(known)}{hint}")


def _check_evaluation(config: Config) -> None:
    if config.evaluate_every and config.evaluate_every_steps:
        raise ValueError("give `evaluate_every` (epochs) or `evaluate_every_steps`, not both")
    needing = {
        "evaluate_every_steps": config.evaluate_every_steps,
        "[early_stopping]": config.early_stopping,
        "checkpoint.best": config.checkpoint and config.checkpoint.best,
    }
    wanted = [key for key, value in needing.items() if value is not None]
    if wanted and (config.data is None or config.data.test is None):
        raise ValueError(f"{wanted[0]} needs an evaluation dataset: give `test` in [data]")
    if config.early_stopping and not (config.evaluate_every_epochs or config.evaluate_every_steps):
        raise ValueError("[early_stopping] needs evaluations, and evaluate_every is 0")


def _check_loss_scaling(config: Config) -> None:
    in_float16 = [
        repr(name)
        for index, name in enumerate(config.stage_names)
        if config.autocast_of(index) == "float16"
    ]
    if in_float16 and config.loss_scaling is None:
        raise ValueError(
            f'autocast = "float16" (stage {", ".join(in_float16)}) loses small gradients '
            "without loss scaling: add a section [loss_scaling], which may be empty, or use "
            '"bfloat16"'
        )


def _check_loss_weight(config: Config) -> None:
    if config.loss_weight is not None and config.loss.kwargs.get("reduction") == "sum":
        raise ValueError(
            "`loss_weight` weighs mean losses, and this loss adds up, without a weight: leave out "
            'one of `loss_weight` and reduction = "sum"'
        )


def _check_count(config: Config) -> None:
    model = config.model
    if model is None:
        return
    counts = {
        "balance": len(model.balance) if isinstance(model.balance, list) else None,
        "num_stages": model.num_stages,
        "[[stages]]": len(config.stages) or None,
    }
    given = {key: count for key, count in counts.items() if count}
    if len(set(given.values())) > 1:
        counted = ", ".join(f"{key} gives {count}" for key, count in given.items())
        raise ValueError(f"the numbers of stages differ: {counted}")
    if config.is_balanced_by_measurement and not given:
        raise ValueError(
            'balance = "auto" needs the number of stages: give num_stages or [[stages]]'
        )


def _check_module(config: Config) -> None:
    if config.model is None or config.model.module is None:
        return
    if config.tied and config.cut is None:
        raise ValueError(
            "`tied` follows from the model's `module`: leave it out, and let the module's own "
            "parameters be one"
        )
    for index, name in enumerate(config.stage_names):
        if config.stage(index).autocast is not None:
            raise ValueError(
                f"stage {name!r}: `autocast` does not go with the model's `module`, which is cut "
                "for one precision: give it to the job"
            )


MOVED_FREELY = {"name", "addresses", "memory", "recompute", "replicas"}
"""Keys of `[[stages]]` that change no bit of a layer that moves there; replicas are counted."""


def _check_rebalance(config: Config) -> None:
    """Refuse to move layers where they would compute something else, or could not be restored."""
    if config.rebalance == "off":
        return
    if config.model is None:
        raise ValueError("`rebalance` moves layers of a [model]; the [[stages]] here are modules")
    if config.wire_dtype is not None:
        raise ValueError("`rebalance` and `wire_dtype`: results would depend on where the cuts are")
    if config.balance_replicas:
        raise ValueError("`rebalance` and `balance_replicas`: a layer's replicas would change")
    if config.rebalance == "auto" and not config.recovery.enabled:
        raise ValueError('rebalance = "auto" needs recovery.enabled = true: it moves snapshots')
    tables = [
        {**stage.model_dump(exclude=MOVED_FREELY), "replicas": stage.num_replicas}
        for stage in config.stages
    ]
    differing = {key for each in tables for key in each if each[key] != tables[0][key]}
    if differing:
        raise ValueError(
            f"`rebalance`: a layer would not compute the same in each of the [[stages]], since "
            f"they differ in {', '.join(sorted(differing))}"
        )
