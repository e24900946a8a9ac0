"""The dashboard in deploy/: it shows all metrics, and queries no others."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest

from rpcmp.observability import run_metrics
from rpcmp.server import server_metrics
from tests.support.places import DEPLOY

GRAFANA = DEPLOY / "grafana.json"

FAMILIES = {family.sample: family for family in (*run_metrics.FAMILIES, *server_metrics.FAMILIES)}
"""All metric families, by the names that queries use."""


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GRAFANA.read_text())["panels"]
    return found


def expressions() -> list[str]:
    targets = [target for panel in panels() for target in panel.get("targets", [])]
    return [target["expr"] for target in targets]


def selected(expression: str) -> list[Any]:
    """Return the selectors of a query, parsed with Prometheus's own grammar."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    plain = (
        expression.replace("$__rate_interval", "1m").replace("$run", ".*").replace("$server", ".*")
    )
    promql_parser.walk(promql_parser.parse(plain), visit)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_queries_name_existing_metrics(expression: str) -> None:
    found = selected(expression)
    assert found
    for selector in found:
        family = FAMILIES[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in ("instance", *family.labels)


@pytest.mark.parametrize("expression", [each for each in expressions() if "rate(" in each])
def test_rates_are_only_taken_of_counters(expression: str) -> None:
    names = re.findall(r"rate\((\w+){", expression)
    assert names
    assert {FAMILIES[name].kind for name in names} == {"counter"}


def test_dashboards_show_all_metrics() -> None:
    shown = {selector.name for each in expressions() for selector in selected(each)}
    assert shown == set(FAMILIES)


def test_legends_name_existing_labels() -> None:
    for panel in panels():
        for target in panel.get("targets", []):
            labels = {"instance"}.union(
                *(FAMILIES[s.name].labels for s in selected(target["expr"]))
            )
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        taken |= cells


def test_variables_query_existing_metrics() -> None:
    variables = json.loads(GRAFANA.read_text())["templating"]["list"]
    queries = [each["query"]["query"] for each in variables if each["type"] == "query"]
    assert {re.findall(r"label_values\((\w+),", query)[0] for query in queries} <= set(FAMILIES)
