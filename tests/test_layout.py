"""Location of each module's test, which follows from its path.

    rpcmp/worker/backward.py    tests/unit/worker/test_backward.py
    rpcmp/cli/tune.py           tests/cli/test_tune.py

A module without a test of its own is listed here, below the test that fails if the module is wrong.
The list may only shrink: a new module brings its test. A test in tests/unit that belongs to several
modules is listed as well, with its subject.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests.support.places import PACKAGE, TESTS

MOST = 75
"""Modules without a test of their own; to be lowered with their number, and never raised."""

ELSEWHERE = {
    "cli/test_hints.py": "cli/options",
    "cli/test_new.py": "examples/spirals",
    "cluster/test_balance_auto.py": "job/autobalance",
    "cluster/test_believed.py": "process/channel server/snapshot_transfer",
    "cluster/test_drive.py": "cli/drive driver/process",
    "cluster/test_faults.py": "worker/process",
    "cluster/test_launch.py": "driver/operations",
    "cluster/test_openmetrics.py": "server/server_metrics",
    "cluster/test_recovery.py": "job/training_workload worker/snapshots",
    "cluster/test_run_log.py": "job/worker_group",
    "cluster/test_servers.py": """
        cli/drain cli/serve cli/status job/generation job/segments server/claim server/lifecycle
    """,
    "cluster/test_verify.py": "cli/verify",
    "controlplane/test_checkpoints.py": "job/restore_point",
    "controlplane/test_hosts.py": "job/server_pool server/snapshot_store",
    "controlplane/test_port.py": "server/services",
    "group/test_bits.py": "driver/stage_group",
    "group/test_plain_truth.py": """
        splitting/proof worker/checks/inner_gradients
        worker/checks/objective
    """,
    "group/test_precision.py": "driver/distributed_optimizer",
    "group/test_replicas.py": "worker/grad_sync",
    "system/test_examples.py": """
        examples/branches examples/encoder_decoder examples/hybrid_devices examples/llama
        examples/residual_ddp examples/resnet50 examples/stdlib_gpt examples/two_parts
        examples/two_towers examples/unet
    """,
    "unit/checkpoint/test_checkpoint.py": "checkpoint/folder checkpoint/manifest",
    "unit/checkpoint/test_state_export.py": "checkpoint/safetensors_header cli/export",
    "unit/cli/test_progress_output.py": "config/cross_checks",
    "unit/driver/test_progress_earlystopping.py": "config/job_sections config/run_sections",
    "unit/driver/test_training.py": "driver/rounds driver/tracing",
    "unit/net/test_rpc_inspection.py": "net/rpc_format net/rpc_pickle",
    "unit/net/test_security.py": "cli/certs net/authority",
    "unit/net/test_tunnel_splice.py": "net/peer_connection",
    "unit/observability/dashboard/test_page_server.py": "observability/web_server",
    "unit/observability/dashboard/test_state.py": """
        observability/dashboard/history observability/dashboard/html_report
    """,
    "unit/observability/events/test_event_all.py": "observability/events/process_events",
    "unit/observability/test_observers_loggers.py": "cli/observing",
    "unit/observability/trace/test_analysis.py": "observability/trace/critical_path",
    "unit/observability/trace/test_chrome.py": "observability/trace/json_stream",
    "unit/pipelining/test_balance.py": "pipelining/cost_model",
    "unit/process/logging/test_logs.py": "process/logging/capture process/logging/collector",
    "unit/process/logging/test_records_visible.py": "cli/console",
    "unit/process/sandbox/test_confinement.py": "process/sandbox/namespace",
    "unit/tools/test_reference_model.py": "tools/reference_parts tools/verification",
    "unit/tools/test_tuning.py": "tools/tuning_report",
    "unit/worker/test_bucket_allreduce.py": "worker/buckets",
    "unit/worker/test_optimizer_state.py": "worker/rehearsal",
}
"""Modules without a test of their own, by the test that proves them."""

PROVED_BY = {module: test for test, names in ELSEWHERE.items() for module in names.split()}


@functools.cache
def all_modules() -> list[str]:
    """Return the modules of rpcmp that need a test, such as "worker/backward"."""
    return [
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
        and "v1" not in {part.name for part in path.parents}
    ]


def owner(test: Path) -> str | None:
    """Return the module that a test belongs to, by its path below tests/unit or tests/cli.

    A module of several subjects may have a test for each: `test_files_bounded.py` is of `files`.
    """
    folder, name = str(test.parent), test.stem.removeprefix("test_")
    known = [module for module in all_modules() if str(Path(module).parent) == folder]
    fits = [m for m in known if f"{name}_".startswith(f"{Path(m).name}_")]
    return max(fits, key=len, default=None)


def with_tests() -> set[str | None]:
    """Return the modules with a test of their own, in tests/unit or, for commands, tests/cli."""
    unit = {owner(path.relative_to(TESTS / "unit")) for path in TESTS.glob("unit/**/test_*.py")}
    return unit | {owner(path.relative_to(TESTS)) for path in TESTS.glob("cli/test_*.py")}


def test_every_module_has_its_test_or_is_listed() -> None:
    assert sorted(set(all_modules()) - with_tests()) == sorted(PROVED_BY), (
        "see ELSEWHERE: it may only shrink"
    )
    assert len(PROVED_BY) <= MOST


def test_every_module_is_listed_once_below_a_test_that_exists() -> None:
    listed = [module for names in ELSEWHERE.values() for module in names.split()]
    assert len(listed) == len(set(listed))
    assert [test for test in ELSEWHERE if not (TESTS / test).exists()] == []


OF_SEVERAL = {
    "pipelining/test_balance.py": "a balance as a whole: how it is measured, predicted and chosen",
    "checkpoint/test_checkpoint.py": "a checkpoint on disk, which its modules write together",
    "process/logging/test_logs.py": "a line of text on its way through rpcmp/process/logging",
    "observability/test_grafana.py": "the dashboard in deploy/, which is no module",
    "test_torch_contract.py": "what rpcmp relies on in torch, which is no module of ours",
}
"""Tests in tests/unit that are not called like a module in their place, and their subjects."""


def test_unit_mirrors_the_package() -> None:
    found = {path.relative_to(TESTS / "unit") for path in TESTS.glob("unit/**/test_*.py")}
    assert {str(path) for path in found if owner(path) is None} == set(OF_SEVERAL)
    assert [path for path in found if not (PACKAGE / path.parent).is_dir()] == []


def test_modules_are_in_the_tier_cluster_by_a_mark_that_is_written_in_full() -> None:
    """`pytest -m cluster` imports only modules with these words; see tests/conftest.py."""
    word = "mark." + "cluster"  # which this module must not have
    marked = {path: text for path in TESTS.rglob("*.py") if word in (text := path.read_text())}
    marked.pop(TESTS / "conftest.py")
    assert [path for path in marked if not path.name.startswith("test_")] == []
    assert [
        path for path, text in marked.items() if text.count(word) != text.count(f"pytest.{word}")
    ] == []
