"""What the README says is so, and each command in it is one that a test runs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rpcmp.cli import COMMANDS, cli
from rpcmp.config import reference
from tests.support.commandlines import parsed
from tests.support.lan import cli as certs
from tests.support.places import ROOT, TESTS
from tests.support.processes import rpcmp
from tests.support.readme import README, block, blocks, commands, commands_of, in_sentences, section

ALL = commands(blocks("sh"))

WORD_FOR_WORD = "From nothing to two hosts"
"""The section whose commands tests/system/test_newcomer.py runs as they stand."""

RUN_BY = {
    "../.ci/run": [
        "pip install -e '.[test]'",  # which contains the next
        "pip install -e '.[examples]'",
        "pytest",
    ],
    "cluster/test_drive.py::test_digits_reaches_98_percent": [
        "rpcmp drive rpcmp/examples/digits.toml",
    ],
    "test_readme.py::test_the_model_and_config_run_as_they_stand": [
        "rpcmp drive config.toml",
        "rpcmp verify config.toml --steps 5",
        "rpcmp drive config.toml --set 'model.balance=[1, 1, 2]' --set data.batch_size=128",
    ],
    "cluster/test_servers.py::test_the_default_ports_are_what_a_bare_connect_uses": [
        "rpcmp serve --stage 0",
        "rpcmp serve --stage 1",
        "rpcmp drive config.toml --connect",
        "rpcmp status config.toml",
    ],
    "system/test_lan.py::test_a_doctor_measures_every_way_and_finds_the_one_that_is_missing": [
        "rpcmp doctor config.toml --connect host-a,host-b --certs certs/driver",
    ],
    "unit/net/test_revocation.py::"
    "test_renewal_keeps_role_hosts_and_the_authority_until_half_of_its_life": [
        "rpcmp certs renew certs",
    ],
    "cluster/test_revocation.py::test_a_running_job_ends_when_a_certificate_is_revoked": [
        "rpcmp certs revoke certs stage1",
    ],
    "cli/test_explain.py::test_a_run_does_what_was_explained": [
        "rpcmp explain config.toml --connect host-a,host-b --certs certs/driver",
    ],
    "cluster/test_openmetrics.py::test_a_run_and_its_servers_are_scraped_while_one_is_lost": [
        "rpcmp drive config.toml --metrics 127.0.0.1:9464",
    ],
    "system/test_lan.py::test_nothing_but_the_one_port_of_each_server_answers": [
        "rpcmp serve --stage 1 --certs stage1 --listen 0.0.0.0:50052 --metrics 0.0.0.0:9465",
    ],
    "system/test_confinement.py::"
    "test_data_that_a_server_does_not_grant_is_refused_before_anything_starts": [
        "rpcmp serve --stage 1 --certs stage1 --data /data",
    ],
    "system/test_page.py::test_a_run_that_trains_loses_a_stage_comes_back_and_ends": [
        "rpcmp drive config.toml --ui",
    ],
    "cli/test_report.py::test_the_command_writes_one_file_and_prints_its_path": [
        "rpcmp report runs/NAME-20261122-101500",
        "rpcmp report runs/NAME-1 runs/NAME-2",
    ],
    "cli/test_report.py::test_the_command_prints_tables": [
        "rpcmp report runs/NAME-1 runs/NAME-2 --text",
    ],
    "cluster/test_hosts.py::test_a_spare_takes_the_stage_of_a_host_that_stays_away": [
        "rpcmp serve --spare --listen 127.0.0.1:50100",
    ],
    "cluster/test_servers.py::test_drain_ends_the_job_after_its_step_and_then_the_server": [
        "rpcmp drain 127.0.0.1:50052",
    ],
    "cluster/test_resume.py::test_resuming_in_the_middle_of_an_epoch_gives_the_same_bits": [
        "rpcmp drive config.toml --resume",
        "rpcmp drive config.toml --resume --set 'model.balance=[1, 3]'",
    ],
    "cluster/test_resume.py::test_an_export_is_the_unsplit_models_state": [
        "rpcmp export checkpoints model.safetensors",
    ],
    "cluster/test_resume.py::test_a_run_can_start_from_given_weights": [
        "rpcmp drive config.toml --set init=model.safetensors",
    ],
    "unit/checkpoint/test_export.py::test_the_best_is_taken_and_no_other_in_its_place": [
        "rpcmp export --best checkpoints model.safetensors",
    ],
    "cli/test_tune.py::test_it_measures_a_real_job": [
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
        "rpcmp bench sleep --stages 8 --microbatches 16",
    ],
    "system/test_benchmarks.py::test_bench_compares_ones_own_job": [
        "rpcmp bench config.toml --peers torch-best --json",
    ],
    "unit/tools/bench/test_comparison.py::test_several_cases_are_a_table_each": [
        "rpcmp bench overhead transformer activations",
    ],
}
"""Other commands: the test that runs each, with files and addresses of its own."""

CHECKED_BY = {
    "unit/net/test_revocation.py::test_a_new_crl_is_loaded_and_a_removed_one_stays_in_force": [
        "scp certs/stage1/* host-b:stage1/",
        "scp certs/ca.crl host-b:stage1/",
    ],
    "system/test_containers.py::test_the_dockerfile_is_valid": [
        "docker build -f deploy/Dockerfile -t rpcmp:0.1.0 .",
    ],
    "system/test_containers.py::test_the_certificates_are_those_that_the_comment_makes": [
        "cd deploy",
        "rpcmp certs init certs --host stage0 --host stage1 --host stage2",
        "chmod 0750 certs/stage? certs/driver",
        "chmod 0640 certs/stage?/tls.key certs/driver/tls.key",
        "sudo chown -R root:10001 certs/stage? certs/driver",
    ],
    "system/test_containers.py::test_the_composition_is_valid": [
        "docker compose up --detach",
        "docker compose logs --follow driver",
    ],
    "system/test_kubernetes.py::test_every_resource_is_valid": [
        "kubectl apply -f deploy/kubernetes.yaml",
        "kubectl -n rpcmp logs -f -l app.kubernetes.io/component=driver",
    ],
    "system/test_slurm.py::test_a_job_that_is_cut_short_saves_and_goes_on_the_next_time": [
        "sbatch --nodes=2 --time=4:00:00 deploy/slurm.sh config.toml --set checkpoint.shared=true",
    ],
}
"""What takes a cluster, an image registry or root: the test of what the command is given."""


def test_every_command_has_its_test() -> None:
    """A new command in the README needs a test, whose name goes into a table above."""
    tables = (RUN_BY, CHECKED_BY)
    listed = [(c, test, table) for table in tables for test in table for c in table[test]]
    typed = commands(section(WORD_FOR_WORD))
    assert sorted(set(ALL).difference(typed)) == sorted(command for command, *_ in listed)
    for command, test, table in listed:
        path, _, name = test.partition("::")
        text = (TESTS / path).read_text()
        if name:
            found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
            assert name in [n.name for n in found], f"{command}: there is no {test}"
            marks = [ast.unparse(d) for n in found if n.name == name for d in n.decorator_list]
            assert "pytest.mark.long" not in marks or table is CHECKED_BY, f"{test} runs nowhere"


SENTENCES = in_sentences()


@pytest.mark.parametrize("command", [*(c for c in ALL if c.startswith("rpcmp ")), *SENTENCES])
def test_every_command_line_is_one_that_rpcmp_takes(command: str) -> None:
    name, *rest = shlex.split(command)[1:]
    found = cli.get_command(click.Context(cli), name)
    if isinstance(found, click.Group) and rest:
        part = found.get_command(click.Context(found), rest[0])
        assert part is not None
        part.make_parser(click.Context(part)).parse_args(rest[1:])
    else:
        parsed([name, *rest])


@pytest.mark.parametrize(
    ("beginning", "count"),
    [("rpcmp certs issue certs", 4), ("rpcmp new mine", 1), ("rpcmp completion", 2)],
)
def test_commands_in_sentences_that_need_no_server_run_as_they_stand(
    beginning: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    certs(Path("certs"), "init")
    found = [c for c in SENTENCES if c.startswith(beginning) and "SHELL" not in c]
    assert len(found) == count
    for command in found:
        result = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output.strip()


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


def test_the_table_of_keys_is_that_of_the_models() -> None:
    assert reference.table() in README, "run `python -m rpcmp.config.reference` and paste its table"


def test_the_links_within_the_readme_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors
        elif "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_model_and_config_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(block("python", "# my_model.py"))
    Path("config.toml").write_text(block("toml", "# config.toml"))
    _, verify, drive = (
        shlex.split(line, comments=True)[1:]
        for line in commands_of(block("sh", "rpcmp drive config.toml   "))
    )
    verified = rpcmp(*verify)
    assert verified.code == 0, verified.err
    driven = rpcmp(*drive, "--json", "--steps", "2")
    assert driven.code == 0, driven.err
    assert list(driven.event("summary")["memory"]) == ["stage0", "stage1", "stage2"]
