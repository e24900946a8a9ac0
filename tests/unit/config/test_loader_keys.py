"""Dotted keys of a config, and their values."""

from __future__ import annotations

import pytest

from rpcmp.config.job_sections import DataConfig, JobSettings, StageConfig
from rpcmp.config.loader import Level, union_members
from rpcmp.config.types import Factory, OptimizerFactory


def level_at(key: str) -> Level:
    level = Level(JobSettings)
    for part in filter(None, key.split(".")):
        level = level.below(part)
    return level


@pytest.mark.parametrize(
    ("key", "level"),
    [
        ("", Level(JobSettings)),
        ("data", Level(DataConfig)),
        ("stages", Level(StageConfig, list)),
        ("stages.0", Level(StageConfig)),
        ("stages.first", Level(None)),
        ("metrics", Level(Factory, dict)),
        ("metrics.accuracy", Level(Factory)),
        ("optimizer", Level(OptimizerFactory)),
        ("stages.0.optimizer", Level(OptimizerFactory)),
        ("optimizer.kwargs", Level(None, dict)),
        ("optimizer.kwargs.lr", Level(None)),
        ("tied", Level(None)),
        ("epochs", Level(None)),
        ("no.such.key", Level(None)),
    ],
)
def test_a_dotted_key_leads_to_its_section(key: str, level: Level) -> None:
    assert level_at(key) == level


def test_keys_below_a_list_or_a_table_belong_to_no_single_section() -> None:
    assert level_at("stages").fields == {}
    assert level_at("metrics").fields == {}
    assert set(level_at("metrics.accuracy").fields) == {"callable", "kwargs"}


def test_union_members_are_taken_apart_without_none() -> None:
    fields = level_at("").fields
    assert union_members(fields["epochs"].annotation) == (int,)
    assert union_members(int | str | None) == (int, str)
    assert union_members(type(None)) == ()
