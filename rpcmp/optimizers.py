"""A stage's optimizer, with the parameter groups that the config asks for.

    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 1e-3 }, groups = [
        { match = ["*.bias", "*norm*"], weight_decay = 0.0 },
    ] }

First comes the group of what no pattern matches, unless one is "*"; then the config's, in their
order. A parameter goes to the first of these of which a pattern matches its name in the unsplit
model. Every stage has all of them, also those that nothing of its own is in: so what a scheduler
keeps of each fits another cut as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from rpcmp import factory
from rpcmp.config import Config
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.kinds import OptimizerFactory
from rpcmp.suggestion import did_you_mean, nearest, what_there_is


def create(source: OptimizerFactory, named: Mapping[str, Tensor], what: str = "optimizer") -> Any:
    """The optimizer of these parameters.

    Args:
        source: the config's.
        named: what it trains, by the names of the unsplit model.
        what: the config key, for the error message.

    Raises:
        FactoryError: it does not import, raised, or knows no such option as a group gives.
    """
    if not source.groups:
        return factory.create(source, what, list(named.values()))
    groups: list[dict[str, Any]] = [{"params": [], **group.options} for group in source.groups]
    rest: list[dict[str, Any]] = [] if _takes_all(source) else [{"params": []}]
    for name, parameter in named.items():
        [*groups, *rest][group_of(source, name)]["params"].append(parameter)
    optimizer = factory.create(source, what, [*rest, *groups])
    _require_options(source, optimizer, what)
    return optimizer


def group_of(source: OptimizerFactory, name: str) -> int:
    """The number among the config's groups of that which a parameter goes to; -1: none."""
    for number, group in enumerate(source.groups):
        if any(fnmatchcase(name, pattern) for pattern in group.match):
            return number
    return -1


def _takes_all(source: OptimizerFactory) -> bool:
    return any("*" in group.match for group in source.groups)


def require_matches(config: Config, names: Mapping[str, Collection[str]]) -> None:
    """Check that every pattern matches a parameter, so that none is misspelt.

    Args:
        config: the job.
        names: of the parameters of every stage, by the stage's name.

    Raises:
        ConfigError: one matches nothing in any stage that has its optimizer.
    """
    seen: dict[tuple[str, int, str], bool] = {}
    for index, stage in enumerate(config.stage_names):
        source = config.optimizer_of(index)
        for number, group in enumerate(source.groups):
            for pattern in group.match:
                hit = any(fnmatchcase(name, pattern) for name in names[stage])
                key = (source.callable, number, pattern)
                seen[key] = seen.get(key, False) or hit
    for (_, number, pattern), hit in seen.items():
        if not hit:
            every = [name for of_stage in names.values() for name in of_stage]
            raise ConfigError(
                f"optimizer.groups.{number}: {pattern!r} matches no parameter of the unsplit model"
                f"{what_there_is(pattern, every)}"
            )


def _require_options(source: OptimizerFactory, optimizer: Any, what: str) -> None:
    """torch takes any key of a group, and a misspelt one does nothing.

    Known is what has a default, here or in the built groups that were not given it; and what all
    groups say, such as `use_muon`, which may have none.
    """
    given = [set(group.options) for group in source.groups]
    known = set(getattr(optimizer, "defaults", ()))
    if _takes_all(source):
        known |= set.intersection(*given)
    else:
        given.insert(0, set())
    for built, options in zip(optimizer.param_groups, given, strict=False):
        known |= set(built) - options - {"params"}
    for number, group in enumerate(source.groups):
        for key in group.options:
            if key not in known:
                raise FactoryError(
                    f"{what}.groups.{number}: {source.callable} has no option {key!r}"
                    f"{did_you_mean(nearest(key, known))}; it has {', '.join(sorted(known))}"
                )
