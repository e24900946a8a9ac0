"""Location of each module's test, which follows from its path.

    rpcmp/worker/backward.py    tests/unit/worker/test_backward.py
    rpcmp/cli/tune.py           tests/cli/test_tune.py

A module without a test of its own is listed here, below the test that fails if the module is wrong.
The list may only shrink: a new module brings its test. A test in tests/unit that belongs to several
modules is listed as well, with its subject.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.places import PACKAGE, TESTS

MOST = 102
"""Modules without a test of their own; to be lowered with their number, and never raised."""

ELSEWHERE = {
    "cli/test_health.py": "server/probe",
    "cli/test_remedy.py": "cli/hints cli/options",
    "cluster/test_balance_auto.py": """
        job/autobalance server/services
    """,
    "cluster/test_believed.py": "job/output_files process/channel server/snapshot_service",
    "cluster/test_drive.py": "cli/drive driver/process rpc/store",
    "cluster/test_faults.py": "worker/process",
    "cluster/test_front.py": "server/endpoints",
    "cluster/test_hosts.py": "job/server_pool server/snapshot_saver server/snapshot_store",
    "cluster/test_launch.py": "driver/operations",
    "cluster/test_leftovers.py": "job/restore_planner",
    "cluster/test_openmetrics.py": "observability/prometheus/server_metrics",
    "cluster/test_recovery.py": "job/training_workload process/liveness worker/snapshots",
    "cluster/test_resume.py": "job/checkpoints",
    "cluster/test_run_log.py": "job/worker_group",
    "cluster/test_segments.py": "job/segments",
    "cluster/test_servers.py": """
        cli/drain cli/serve cli/status job/generation server/claim server/lifecycle
        server/stage_server
    """,
    "cluster/test_verify.py": "cli/verify",
    "cluster/test_tunnel.py": "net/dialer",
    "group/test_bits.py": "driver/stage_group driver/worker_refs worker/step_runner",
    "group/test_optimizers.py": "driver/distributed_optimizer",
    "group/test_ties.py": "worker/grad_sync/tied",
    "system/test_examples.py": """
        examples/branches examples/encoder_decoder examples/hybrid_devices examples/llama
        examples/residual_ddp examples/resnet50 examples/stdlib_gpt examples/two_parts
        examples/two_towers examples/unet
    """,
    "unit/checkpoint/test_checkpoint.py": "checkpoint/folder checkpoint/manifest",
    "unit/checkpoint/test_state_export.py": "checkpoint/safetensors_header cli/export",
    "unit/checkpoint/test_stage_state.py": "checkpoint/slot_writer",
    "unit/cli/test_output.py": "cli/terminal config/validation",
    "unit/config/test_importing.py": "config/suggestion",
    "unit/data/test_batch_server.py": "data/batch_prefetch",
    "unit/data/test_index_batches.py": "driver/datasets",
    "unit/data/test_stage_loader.py": "data/loader_process",
    "unit/driver/test_progress.py": "driver/checkpoint_schedule",
    "unit/driver/test_progress_earlystopping.py": "config/run_sections config/sections",
    "unit/driver/test_training.py": "driver/evaluator driver/rounds driver/tracing",
    "unit/net/test_link_test.py": "net/tls",
    "unit/net/test_local_peer.py": "net/port",
    "unit/net/test_revocation.py": "net/certificates",
    "unit/net/test_rpc_inspection.py": "net/rpc_format net/rpc_pickle",
    "unit/net/test_security.py": "cli/certs net/authority",
    "unit/observability/dashboard/test_page_server.py": "observability/dashboard/app",
    "unit/observability/dashboard/test_state.py": """
        observability/dashboard/history observability/dashboard/html
    """,
    "unit/observability/events/test_event_all.py": """
        observability/events/process_events observability/events/training_events
    """,
    "unit/observability/prometheus/test_run_metrics.py": "observability/prometheus/registry",
    "unit/observability/run_folder/test_figures.py": "observability/run_folder/reader",
    "unit/observability/test_observers_loggers.py": "cli/observing",
    "unit/observability/test_tensorboard.py": "observability/tensorboard_file",
    "unit/observability/trace/test_analysis.py": "observability/trace/critical_path",
    "unit/observability/trace/test_chrome.py": "observability/trace/json_stream",
    "unit/pipelining/test_balance.py": "pipelining/cost_model",
    "unit/process/logging/test_logs.py": """
        process/logging/capture process/logging/display
        process/logging/receiver
    """,
    "unit/process/logging/test_records_visible.py": "cli/console",
    "unit/process/test_activity.py": "process/descriptors",
    "unit/process/sandbox/test_confinement.py": "process/sandbox/namespace",
    "unit/rpc/test_transport_payload.py": "rpc/messages",
    "unit/server/test_claim_log.py": "process/tempdirs",
    "unit/tools/tune/test_sweep.py": "tools/tune/setting_times tools/tune/sweep_report",
    "unit/tools/verify/test_reference_model.py": """
        tools/verify/verification tools/verify/reference_parts
    """,
    "unit/worker/grad_sync/test_bucket_allreduce.py": "worker/grad_sync/buckets",
    "group/test_replicas.py": "driver/replica_check worker/grad_sync/sync",
    "unit/worker/test_optimizer_state.py": "worker/option_overrides worker/rehearsal",
}
"""Modules without a test of their own, by the test that proves them."""

PROVED_BY = {module: test for test, names in ELSEWHERE.items() for module in names.split()}


def all_modules() -> list[str]:
    """Return the modules of rpcmp that need a test, such as "worker/backward"."""
    return [
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
        and not {"v1", "new"} & {part.name for part in path.parents}
    ]


def owner(test: Path) -> str | None:
    """Return the module that a test belongs to, by its path below tests/unit or tests/cli.

    A module of several subjects may have a test for each: `test_files_jsonlines.py` is of `files`.
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
    "observability/prometheus/test_grafana.py": "the dashboard in deploy/, which is no module",
    "test_torch_contract.py": "what rpcmp relies on in torch, which is no module of ours",
}
"""Tests in tests/unit that are not called like a module in their place, and their subjects."""


def test_unit_mirrors_the_package() -> None:
    found = {path.relative_to(TESTS / "unit") for path in TESTS.glob("unit/**/test_*.py")}
    assert {str(path) for path in found if owner(path) is None} == set(OF_SEVERAL)
    assert [path for path in found if not (PACKAGE / path.parent).is_dir()] == []
