"""A config's text with the hosts of a plan."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from rpcmp.config.planned_file import planned, written

TEXT = """\
# what it is
name = "job"
tied = [
  ["a.weight", "b.weight"],  # one embedding
]

[model]  # the model
layers = "mine:layers"
num_stages = 2          # goes
balance = [
  1,
  2,
]
[model.kwargs]
width = 3  # narrow

[[stages]]
addresses = ["old:1"]
[stages.kwargs]
goes = true

[recovery]
spares = ["old:2"]
replace_after = 2.5  # soon
"""

STAGES = [{"addresses": ["a:1"], "device": "auto"}, {"addresses": ["b:1"], "device": "auto"}]


def result(text: str, spares: list[str]) -> tuple[str, dict[str, Any]]:
    data = planned(tomllib.loads(text), [2, 3], STAGES, spares)
    new = written(text, data, "planned\ntoday")
    assert tomllib.loads(new) == data
    return new, data


def test_comments_stay_and_only_the_plan_is_new() -> None:
    text, data = result(TEXT, ["c:1"])
    servers = 'planned_for = ["a:1", "b:1", "c:1"]'
    assert text.startswith(f'# planned\n# today\n{servers}\n# what it is\nname = "job"\n')
    for kept in ("# one embedding", "[model]  # the model", "# narrow", "# soon"):
        assert kept in text
    assert "old" not in text
    assert "goes" not in text
    assert data["model"] == {
        "layers": "mine:layers",
        "balance": [2, 3],
        "kwargs": {"width": 3},
    }
    assert data["stages"] == STAGES
    assert data["recovery"] == {"replace_after": 2.5, "spares": ["c:1"]}


AROUND = """\
# Planned by `rpcmp plan` for 3 hosts: a step takes about 900.0 ms with 1f1b
loss = "a:b"
[model]
layers = "mine:layers"
num_stages = 2
[[stages]]
addresses = ["old:1"]
# of the data
[data]
train = "mine:data"
[recovery]
spares = ["old:2"]  # stands by
"""


def test_comments_around_what_is_replaced_stay_but_not_those_of_a_former_plan() -> None:
    text, data = result(AROUND, [])
    assert "# of the data\n[data]" in text
    assert "900.0 ms" not in text
    assert data["recovery"] == {}
    odd = AROUND.replace("# of the data", "# of \u2028 the data").replace("\n", "\r\n")
    assert "# of \u2028 the data" in result(odd, ["c:1"])[0]


def test_without_spares_the_config_names_none() -> None:
    assert result(TEXT, [])[1]["recovery"] == {"replace_after": 2.5}
    bare = TEXT.partition("[recovery]")[0]
    assert "recovery" not in result(bare, [])[1]
    text, data = result(bare, ["c:1"])
    assert data["recovery"] == {"spares": ["c:1"]}
    assert "# narrow" in text


@pytest.mark.parametrize(
    "text",
    [
        'model = { layers = "mine:layers", kwargs = { a = [1, 2.5] } }  # gone',
        'model.layers = "mine:layers"\nmodel.kwargs."odd key" = "new\\nline \\u007f"',
        '[model]\nlayers = "m:l"\n[model.kwargs]\nat = 2026-11-27T04:00:00Z\nno = false\nx = inf',
        '[model]\nlayers = "m:l"\n[data]\n[[metrics.list]]\na = 1\n[[metrics.list]]\nb = {}',
        '[model]\nlayers = """\n[stages]\n"""',
    ],
)
def test_whatever_the_text_looks_like_the_config_is_the_planned_one(text: str) -> None:
    result(text, ["c:1"])


def test_a_changed_value_is_written_though_the_text_has_another() -> None:
    data = planned({**tomllib.loads(TEXT), "seed": 3}, [5], STAGES[:1], [])
    text = written(TEXT, data, "")
    assert tomllib.loads(text) == data
    assert "narrow" not in text  # written anew
