"""The pages are correct: a test runs every command, and every link has a target."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rpcmp.cli import COMMANDS, cli
from rpcmp.tools import cluster_simulation
from tests.support.commandlines import parsed
from tests.support.docs import (
    PAGES,
    README,
    anchors,
    block,
    blocks,
    commands,
    commands_of,
    guide,
    in_sentences,
    links,
    section,
    without_blocks,
)
from tests.support.key_table import table as table_of_keys
from tests.support.lan import cli as certs
from tests.support.places import ROOT, TESTS
from tests.support.processes import rpcmp

CURRENT = {path: text for path, text in PAGES.items() if path != "CHANGELOG.md"}
"""Pages about this version: commands of earlier ones may be gone."""

ALL = commands([block for text in CURRENT.values() for block in blocks("sh", text)])

SENTENCES = list(dict.fromkeys(found for text in CURRENT.values() for found in in_sentences(text)))

WORD_FOR_WORD = "From nothing to two hosts"
"""The section whose commands tests/system/test_newcomer.py runs as they stand."""

README_LINES = 350
"""The README is a front door: longer explanations belong on a page of the guide."""

RUN_BY = {
    "../.ci/run": [
        "pip install -e '.[test]'",  # which contains the next
        "pip install -e '.[examples]'",
        "pytest",
        "pytest -m cluster",
        "pytest -m system",
        "ruff format .",
        "ruff check --fix .",
        "mypy --strict",
        "python3 -m venv .venv",
        ". .venv/bin/activate",
    ],
    "cluster/test_drive.py::test_digits_reaches_98_percent": [
        "rpcmp drive rpcmp/examples/digits.toml",
    ],
    "test_docs.py::test_the_model_and_config_run_as_they_stand": [
        "rpcmp drive mlp.toml",
        "rpcmp verify mlp.toml --steps 5",
        "rpcmp drive mlp.toml --set model.num_stages=3 --set data.batch_size=128",
    ],
    "cli/test_join.py::test_a_spare_joins_a_job_and_another_host_leaves_it": [
        "rpcmp serve --spare --listen 127.0.0.1:50060",
        "rpcmp serve --spare --listen 127.0.0.1:50100",
        "rpcmp join 127.0.0.1:50060 --to 127.0.0.1:50051",
        "rpcmp drain --leave 127.0.0.1:50052",
    ],
    "cluster/test_servers.py::test_the_default_ports_are_what_a_bare_connect_uses": [
        "rpcmp serve --stage 0",
        "rpcmp serve --stage 1",
        "rpcmp drive config.toml --connect",
        "rpcmp status config.toml",
    ],
    "system/test_lan.py::test_doctor_measures_every_link_and_names_the_missing_one": [
        "rpcmp doctor config.toml --connect host-a,host-b --certs certs/driver",
    ],
    "unit/net/test_certificates.py::"
    "test_renewal_keeps_role_hosts_and_the_authority_until_half_of_its_life": [
        "rpcmp certs renew certs",
    ],
    "cluster/test_revocation.py::test_a_running_job_ends_when_a_certificate_is_revoked": [
        "rpcmp certs revoke certs stage1",
    ],
    "cli/test_explain.py::test_a_run_does_what_was_explained": [
        "rpcmp explain config.toml --connect host-a,host-b --certs certs/driver",
    ],
    "cli/test_plan.py::test_a_planned_run_has_the_bits_of_any_other": [
        "rpcmp plan config.toml --connect host-a:50051,host-b:50051,host-c:50051 -o planned.toml",
        "rpcmp drive planned.toml",
    ],
    "cluster/test_openmetrics.py::test_a_run_and_its_servers_are_scraped_while_one_is_lost": [
        "rpcmp drive config.toml --metrics 127.0.0.1:9464",
    ],
    "system/test_lan.py::test_only_the_one_port_of_each_server_answers": [
        "rpcmp serve --stage 1 --certs stage1 --listen 0.0.0.0:50052 --metrics 0.0.0.0:9465",
    ],
    "system/test_confinement.py::"
    "test_data_not_granted_by_a_server_is_refused_before_anything_starts": [
        "rpcmp serve --stage 1 --certs stage1 --data /data",
    ],
    "system/test_page.py::test_the_page_follows_a_run_through_a_fault_to_its_end": [
        "rpcmp drive config.toml --ui",
    ],
    "cli/test_report.py::test_the_command_writes_one_file_and_prints_its_path": [
        "rpcmp report runs/NAME-20261122-101500",
        "rpcmp report runs/NAME-1 runs/NAME-2",
    ],
    "cli/test_report.py::test_the_command_prints_tables": [
        "rpcmp report runs/NAME-1 runs/NAME-2 --text",
    ],
    "cluster/test_takeover.py::test_another_driver_goes_on_where_the_servers_are": [
        "rpcmp drive config.toml --connect host-a,host-b --certs certs/driver --resume",
    ],
    "cluster/test_servers.py::test_an_idle_server_ends_when_it_is_drained": [
        "rpcmp drain 127.0.0.1:50052",
    ],
    "cluster/test_resume.py::test_resuming_in_the_middle_of_an_epoch_gives_the_same_bits": [
        "rpcmp drive config.toml --resume",
        "rpcmp drive config.toml --resume --set 'model.balance=[1, 3]'",
    ],
    "cluster/test_resume.py::test_an_export_is_the_state_dict_of_the_unsplit_model": [
        "rpcmp export checkpoints model.safetensors",
    ],
    "cluster/test_resume.py::test_a_run_can_start_from_given_weights": [
        "rpcmp drive config.toml --set init=model.safetensors",
    ],
    "unit/checkpoint/test_state_export.py::test_export_takes_the_marked_best_or_fails": [
        "rpcmp export --best checkpoints model.safetensors",
    ],
    "cli/test_tune.py::test_tune_measures_a_real_job": [
        "rpcmp tune config.toml --png curve.png",
        "rpcmp tune config.toml --microbatches-per-message 1,4",
    ],
    "cluster/test_drive.py::test_a_trace_has_every_action_of_every_stage": [
        "rpcmp drive config.toml --trace run.json.gz",
    ],
    "cli/test_trace.py::test_png_draws_the_last_two_complete_steps": [
        "rpcmp trace run.json.gz --png pipeline.png",
    ],
    "system/test_benchmarks.py::test_bench_prints_ours_beside_a_peer": [
        "rpcmp bench sleep",
        "rpcmp bench sleep --stages 8 --microbatches 16",
        "rpcmp bench transformer --json --peers torch-1f1b",
    ],
    "system/test_benchmarks.py::test_bench_compares_the_users_job": [
        "rpcmp bench config.toml",
        "rpcmp bench config.toml --peers torch-best --json",
    ],
    "unit/tools/bench/test_benchmark.py::test_several_cases_give_a_table_each": [
        "rpcmp bench overhead transformer activations",
    ],
}
"""Other commands: the test that runs each, with files and addresses of its own."""

CHECKED_BY = {
    "unit/net/test_certificates.py::test_a_new_crl_is_loaded_and_a_removed_one_stays_in_force": [
        "scp certs/stage1/* host-b:stage1/",
        "scp certs/ca.crl host-b:stage1/",
    ],
    "system/test_containers.py::test_the_dockerfile_is_valid": [
        "docker build -f deploy/Dockerfile -t rpcmp:0.1.0 .",
    ],
    "system/test_containers.py::test_the_comments_commands_make_the_mounted_certificates": [
        "cd deploy",
        "rpcmp certs init certs --host stage0 --host stage1 --host stage2",
        "chmod 0750 certs/stage? certs/driver",
        "chmod 0640 certs/stage?/tls.key certs/driver/tls.key",
        "sudo chown -R root:10001 certs/stage? certs/driver",
    ],
    "system/test_containers.py::test_the_compose_file_is_valid": [
        "docker compose up --detach",
        "docker compose logs --follow driver",
    ],
    "system/test_kubernetes.py::test_every_resource_is_valid": [
        "kubectl apply -f deploy/kubernetes.yaml",
        "kubectl -n rpcmp logs -f -l app.kubernetes.io/component=driver",
    ],
    "system/test_slurm.py::test_a_job_cut_short_saves_and_resumes_when_requeued": [
        "sbatch --nodes=2 --time=4:00:00 deploy/slurm.sh config.toml --set checkpoint.shared=true",
    ],
    "test_ci.py::test_hooks_before_a_commit_run_programs_of_the_test_extra": [
        "pip install pre-commit",
        "pre-commit install",
    ],
    "test_ci.py::test_commits_that_blame_passes_over_are_written_in_full": [
        "git config blame.ignoreRevsFile .git-blame-ignore-revs",
    ],
    "cli/test_new.py::test_a_job_may_start_as_an_example": ["rpcmp new tune --like finetune"],
    "test_docs.py::test_the_tiers_equal_the_markers_of_pytest": ["pytest -m long"],
    "system/test_gpu.py::test_the_classic_table_is_printed_and_drawn_on_a_pretend_one": [
        "python -m tests.benchmarks.gpu --plot gpu.svg",
    ],
    "system/test_gpu.py::test_the_tier_of_accelerators_passes_on_a_pretend_one": ["pytest -m gpu"],
    "unit/server/test_connection.py::test_the_releases_of_torch_are_those_of_the_package": [
        "python3.13 -m venv /tmp/other",
        ". /tmp/other/bin/activate",
        'pip install "torch==2.15.*" -e ".[test]"',
        'pytest -m long -k "compile or recovery"',
        "pytest -m system -k architectures",
    ],
    "test_docs.py::test_paths_and_modules_that_pages_name_exist": [
        "pytest -n0 -q tests/unit/worker",
        "pytest -n0 -q tests/test_architecture.py tests/test_layout.py tests/test_docs.py",
    ],
    "system/test_chaos.py::test_what_random_faults_have_found_stays_mended": [
        "python -m tests.benchmarks.chaos --minutes 60",
    ],
    "system/test_benchmarks.py::test_benchmarks_of_replicas_take_the_options_of_their_page": [
        "python -m tests.benchmarks.replicas exchange --apart",
        "python -m tests.benchmarks.replicas exchange --megabytes 100",
        "python -m tests.benchmarks.replicas step --pairs 15 --steps 10",
        "python -m tests.benchmarks.replicas step --set num_microbatches=8",
    ],
}
"""Commands that need a cluster, a registry, root or much time, with the test of their arguments."""


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= README_LINES


def test_every_command_has_its_test() -> None:
    """A new command on a page needs a test, whose name goes into a table above.

    Of a module without arguments, test_paths_and_modules_that_pages_name_exist is enough.
    """
    tables = (RUN_BY, CHECKED_BY)
    listed = [(c, test, table) for table in tables for test in table for c in table[test]]
    typed = commands(section(WORD_FOR_WORD))
    typed += [command for command in ALL if re.fullmatch(r"python -m tests\.[\w.]+", command)]
    assert sorted(set(ALL).difference(typed)) == sorted(command for command, *_ in listed)
    for command, test, table in listed:
        path, _, name = test.partition("::")
        text = (TESTS / path).read_text()
        if name:
            found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
            assert name in [n.name for n in found], f"{command}: there is no {test}"
            marks = [ast.unparse(d) for n in found if n.name == name for d in n.decorator_list]
            assert "pytest.mark.long" not in marks or table is CHECKED_BY, f"{test} runs nowhere"


def test_the_tiers_equal_the_markers_of_pytest() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in options["markers"]}
    tiers = re.findall(r"(?m)^\| `pytest -m (\w+)` \|", PAGES["tests/README.md"])
    assert markers == set(tiers)


def test_the_guide_has_a_row_for_each_package() -> None:
    rows = re.findall(r"(?m)^\| `rpcmp/(\w+)/` \|", guide("how-it-works"))
    packages = {path.parent.name for path in (ROOT / "rpcmp").glob("*/__init__.py")}
    assert sorted(rows) == sorted(packages - {"v1", "examples"})


def test_the_pages_promise_one_time_for_the_tests() -> None:
    """A run costs at most MAX_UNITS of tests/support/costs.py, which this figure follows from."""
    promises = {
        "README.md": r"That takes ([\w ]+) minutes on two cores",
        "tests/README.md": r"(?m)^\| `pytest` \|.*\| ([\w ]+) minutes \|$",
        ".github/CONTRIBUTING.md": r"(?m)^pytest +# ([\w ]+) minutes, before you push$",
    }
    found = {path: re.findall(promise, PAGES[path]) for path, promise in promises.items()}
    assert list(found.values()) == [["five"]] * len(promises), found


def test_paths_and_modules_that_pages_name_exist() -> None:
    spans = [*ALL, *(s for text in CURRENT.values() for s in re.findall(r"`([^`\n]+)`", text))]
    place = re.compile(r"(?<![\w/-])(?:rpcmp|tests|deploy|protos|\.github)/[\w./-]*\w/?")
    paths = {path for span in spans for path in place.findall(span) if "NAME" not in path}
    assert {"rpcmp/worker/backward.py", "tests/unit/worker/test_backward.py"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = {name for span in spans for name in re.findall(r"python -m ([\w.]+)", span)}
    assert {"tests.benchmarks.recovery", "tests.support.key_table"} <= modules
    for module in modules:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations:
            found = importlib.util.find_spec(f"{module}.__main__")
        assert found is not None, module
        assert found.origin is not None
        assert '__name__ == "__main__"' in Path(found.origin).read_text(), module


def test_rpcmp_accepts_every_documented_command_line() -> None:
    refused = {}
    for line in [*(c for c in ALL if c.startswith("rpcmp ")), *SENTENCES]:
        name, *rest = shlex.split(line)[1:]
        found = cli.get_command(click.Context(cli), name)
        try:
            if isinstance(found, click.Group) and rest:
                part = found.get_command(click.Context(found), rest[0])
                assert part is not None, line
                part.make_parser(click.Context(part)).parse_args(rest[1:])
            else:
                parsed([name, *rest])
        except click.UsageError as error:
            refused[line] = error.message
    assert refused == {}


@pytest.mark.parametrize(
    ("beginning", "count"),
    [
        ("rpcmp certs issue certs", 5),
        ("rpcmp new mine", 1),
        ("rpcmp completion", 2),
        ("rpcmp guide", 4),
    ],
)
def test_commands_in_sentences_that_need_no_server_run_as_they_stand(
    beginning: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    certs(Path("certs"), "init")
    found = [c for c in SENTENCES if c.startswith(beginning) and not re.search("SHELL|TOPIC", c)]
    assert len(found) == count
    for command in found:
        result = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output.strip()


def options(group: click.Group) -> Iterator[str]:
    """Return every option of a group's commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from options(command)
        for param in command.get_params(context):
            yield from (*param.opts, *param.secondary_opts)


OTHERS = {"--build-arg"}
"""Options of other programs, here docker's."""


def test_every_option_that_a_page_names_exists() -> None:
    known = {*options(cli), *OTHERS}
    named = {
        (path, option)
        for path, text in CURRENT.items()
        for option in re.findall(r"`(--?[a-z][\w-]*)[^`]*`", without_blocks(text))
    }
    assert [place for place in named if place[1] not in known] == []


def test_each_row_of_what_plain_pytorch_does_names_the_tests_that_show_it() -> None:
    table = re.search(r"\| in plain PyTorch .*?\n\n", guide("promises"), re.DOTALL)
    assert table is not None
    _, _, *rows = table.group().strip().splitlines()
    shown = [re.findall(r"`(\w+)`", row.split("|")[-2]) for row in rows]
    files = (ROOT / "tests").rglob("test_*.py")
    tests = {name for path in files for name in re.findall(r"def test_(\w+)", path.read_text())}
    assert all(shown)
    assert {name for names in shown for name in names} - tests == set()
    assert len(rows) > 30


def test_the_table_of_commands_has_each_with_its_one_line() -> None:
    rows = dict(re.findall(r"^\| `rpcmp (\w+)[^|]*` \| (.*) \|$", README, re.MULTILINE))
    assert sorted(rows) == sorted(COMMANDS)
    shown = CliRunner().invoke(cli, ["--help"]).output
    for name, row in rows.items():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        line = command.get_short_help_str(limit=1000)
        assert row.startswith(line.removesuffix(".")), f"{name}: {line}"
        assert re.search(rf"(?m)^  {name} +{re.escape(line)}$", shown), f"{name} is cut off"


def test_the_table_of_keys_equals_the_schema() -> None:
    assert table_of_keys() in guide("configuration"), (
        "run `python -m tests.support.key_table` and paste its table"
    )


def test_relative_links_and_anchors_lead_somewhere() -> None:
    of_page = {path: anchors(text) for path, text in PAGES.items()}
    lost = []
    for path, target in ((path, link) for path, text in PAGES.items() for link in links(text)):
        file, _, anchor = target.partition("#")
        found = (ROOT / path).parent / file if file else ROOT / path
        if "://" not in target and not (
            found.exists()
            and (not anchor or anchor in of_page[str(found.resolve().relative_to(ROOT))])
        ):
            lost.append(f"{path}: {target}")
    assert lost == []


def test_the_guides_index_has_each_page() -> None:
    listed = re.findall(r"(?m)^- \[([\w-]+)\]\(([^)]+)\): ", guide("README"))
    assert len(listed) == len(dict(listed))
    targets = [
        str((ROOT / "rpcmp/guide" / target).resolve().relative_to(ROOT)) for _, target in listed
    ]
    pages = {path for path in PAGES if path.startswith("rpcmp/guide/")} - {"rpcmp/guide/README.md"}
    assert set(targets) == pages | {"rpcmp/examples/README.md"}
    linked = {target for target in links(README) if target.startswith("rpcmp/guide/")}
    assert pages <= {target.partition("#")[0] for target in linked}


def test_the_guide_and_the_readme_show_the_same_model() -> None:
    for language, starts_with in (("python", "# mlp.py"), ("toml", "# mlp.toml")):
        assert block(language, starts_with) == block(language, starts_with, guide("models"))


def keys(config: dict[str, Any]) -> Iterator[str]:
    """Return the keys of a part of a config as in the table of keys."""
    table = table_of_keys()
    for name, value in config.items():
        if f"**`{name}`**" in table:
            yield from (f"{name}.{key}" for key in value)
        elif name == "stages":
            yield from (f"stages[].{key}" for stage in value for key in stage)
        else:
            yield name


CLUSTER = "# cluster.toml"
"""Begins what is no piece of a config."""


def test_every_piece_of_a_config_has_keys_that_exist() -> None:
    pieces = [piece for text in CURRENT.values() for piece in blocks("toml", text)]
    for piece in (piece for piece in pieces if not piece.startswith(CLUSTER)):
        unknown = [k for k in keys(tomllib.loads(piece)) if f"| `{k}` |" not in table_of_keys()]
        assert unknown == [], piece


def test_the_cluster_of_the_guide_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(block("toml", CLUSTER, guide("clusters")))
    cluster = cluster_simulation.load(path)
    assert cluster.stages == [10, 100, 1000]
    assert 0 < cluster_simulation.outlook(cluster, 10).efficiency < 1


def test_the_model_and_config_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mlp.py").write_text(block("python", "# mlp.py"))
    Path("mlp.toml").write_text(block("toml", "# mlp.toml"))
    _, verify, drive = (
        shlex.split(line, comments=True)[1:]
        for line in commands_of(block("sh", "rpcmp drive mlp.toml   "))
    )
    verified = rpcmp(*verify)
    assert verified.code == 0, verified.err
    driven = rpcmp(*drive, "--json", "--steps", "2")
    assert driven.code == 0, driven.err
    assert list(driven.event("summary")["memory"]) == ["stage0", "stage1", "stage2"]
