"""A stage's optimizer, with the parameter groups that the config asks for.

    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 1e-3 }, groups = [
        { match = ["*.bias", "*norm*"], weight_decay = 0.0 },
    ] }

The first group is for parameters that no pattern matches, unless one is "*"; then the config's
follow, in order. A parameter goes to the first of these with a pattern that matches its name in the
unsplit model, or any of its names if it is tied. Every stage has all groups, even empty ones, so
that the state of a scheduler fits another cut as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory, OptimizerFactory
from rpcmp.errors import ConfigError, FactoryError, did_you_mean, nearest, suggest
from rpcmp.pipelining.lazy_dynamo import defer_dynamo

Trained = Mapping[str, Mapping[str, bool]]
"""Whether each parameter is trained, by its stage and its name in the unsplit model."""


def step_scheduler(scheduler: Any, loss: float) -> None:
    """Step a scheduler, if there is one; `loss` is for those that watch one."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()


def create(source: OptimizerFactory, named: Mapping[str, Tensor], what: str = "optimizer") -> Any:
    """Create the optimizer of these parameters, by their names in the unsplit model.

    Raises:
        FactoryError: it does not import, raised, or does not know an option of a group; names the
            parameters that it does not take.
    """
    defer_dynamo()
    try:
        optimizer = importing.create(source, what, _arranged(source, named))
    except FactoryError as error:
        if not (refused := _refused(source, named)):
            raise
        first, _, lines = str(error).partition("\n")
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise FactoryError(
            f"{first}; it does not take {refused[0]!r}{others}: give this stage an `optimizer` "
            f"that does\n{lines}".rstrip()
        ) from error
    _require_options(source, named, optimizer, what)
    return optimizer


def group_of(source: OptimizerFactory, name: str) -> int:
    """Return the index of a parameter's group in the config's groups; -1 if it has none."""
    names = source.names_of(name)
    for number, group in enumerate(source.groups):
        if any(fnmatchcase(name, pattern) for pattern in group.match for name in names):
            return number
    return -1


def _arranged(source: OptimizerFactory, named: Mapping[str, Tensor], without: str = "") -> Any:
    """Return the optimizer's argument: parameters or groups; `without` one of their options."""
    if not source.groups:
        return list(named.values())
    groups: list[dict[str, Any]] = [{"params": [], **group.options} for group in source.groups]
    for group in groups:
        group.pop(without, None)
    rest: list[dict[str, Any]] = [] if _takes_all(source) else [{"params": []}]
    for name, parameter in named.items():
        [*groups, *rest][group_of(source, name)]["params"].append(parameter)
    return [*rest, *groups]


def _takes_all(source: OptimizerFactory) -> bool:
    return any("*" in group.match for group in source.groups)


def _can_build(source: OptimizerFactory, named: Mapping[str, Tensor], without: str = "") -> bool:
    try:
        importing.create(source, "optimizer", _arranged(source, named, without))
    except FactoryError:
        return False
    return True


def _refused(source: OptimizerFactory, named: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters that the optimizer refuses; empty if it cannot be built at all."""
    if not _can_build(source, {"": nn.Parameter(torch.zeros(1, 1))}):
        return []
    return [name for name, value in named.items() if not _can_build(source, {name: value})]


def require_matches(config: Config, trained: Trained) -> None:
    """Check that every pattern matches a parameter that its optimizer trains."""
    stages: dict[str, list[int]] = {}
    for index in range(config.num_stages):
        key = f"stages.{index}.optimizer" if _has_own(config, index) else "optimizer"
        stages.setdefault(key, []).append(index)
    for key, indexes in stages.items():
        names = [name for index in indexes for name in _trained_in(config, index, trained)]
        for number, group in enumerate(config.optimizer_of(indexes[0]).groups):
            for pattern in group.match:
                if pattern.startswith("loss."):  # known where the loss is built
                    continue
                if not any(fnmatchcase(name, pattern) for name in names):
                    why = _why_nothing(config, pattern, trained)
                    raise ConfigError(f"{key}.groups.{number}: {pattern!r} matches {why}")


def _has_own(config: Config, index: int) -> bool:
    """Return whether a stage has its own optimizer, not the job's with other arguments."""
    return isinstance(config.stage(index).optimizer, Factory)


def _trained_in(config: Config, index: int, trained: Trained) -> Iterator[str]:
    for name, is_trained in trained[config.stage_names[index]].items():
        if is_trained and name not in config.tied_to:
            yield from config.optimizer_of(index).names_of(name)


def _why_nothing(config: Config, pattern: str, trained: Trained) -> str:
    """Return the end of an error: the matches of a pattern that its optimizer does not train."""
    stage_of = {name: stage for stage, names in trained.items() for name in names}
    matched = [name for name in stage_of if fnmatchcase(name, pattern)]
    if not matched:
        return f"no parameter of the unsplit model{suggest(pattern, stage_of)}"
    for name in matched:
        first = config.tied_to.get(name, name)
        stage = stage_of.get(first, stage_of[name])
        if trained[stage].get(first):
            tied = f", tied to {first!r}," if first != name else ""
            is_own = _has_own(config, config.stage_names.index(stage))
            trainer = f"the optimizer of stage {stage!r}" if is_own else "the job's optimizer"
            return f"nothing that it trains: {name!r}{tied} is trained by {trainer}"
    return (
        f"frozen parameters only, such as {matched[0]!r} of stage {stage_of[matched[0]]!r}, which "
        "no optimizer trains: leave the pattern out, or train them"
    )


def _require_options(
    source: OptimizerFactory, named: Mapping[str, Tensor], optimizer: Any, what: str
) -> None:
    """Refuse unknown options: torch takes any key of a group, and a misspelt one does nothing.

    Options are known if they have a default, in the optimizer or in built groups that were not
    given them, or if the optimizer cannot be built without them, such as `use_muon`.
    """
    if not source.groups:
        return
    given = [set(group.options) for group in source.groups]
    if not _takes_all(source):
        given.insert(0, set())
    known = set(getattr(optimizer, "defaults", ()))
    for built, options in zip(optimizer.param_groups, given, strict=False):
        known |= set(built) - options - {"params"}
    for number, group in enumerate(source.groups):
        for key in group.options:
            if key not in known and not _is_needed(source, named, key):
                raise FactoryError(
                    f"{what}.groups.{number}: {source.callable} has no option {key!r}"
                    f"{did_you_mean(nearest(key, known))}; it has {', '.join(sorted(known))}"
                )


def _is_needed(source: OptimizerFactory, named: Mapping[str, Tensor], option: str) -> bool:
    """Return whether the optimizer cannot be built unless its groups give the option."""
    shapes = {n: nn.Parameter(torch.empty_like(p, device="meta")) for n, p in named.items()}
    return not _can_build(source, shapes, without=option)
