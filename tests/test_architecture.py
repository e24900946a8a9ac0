"""The import order of packages and tests, and that generated files are up to date."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.support.places import PACKAGE, TESTS

PROTOS = PACKAGE.parent / "protos"

LAYERS = """
    __init__ errors losses metrics v1
    examples
    config
    splitting
    pipelining
    process
    net
    rpc
    checkpoint
    observability
    data
    worker
    driver
    server
    job
    tools
    cli
    __main__
"""
"""The packages of rpcmp, bottom up, and the modules beside them. Each imports only from the lines
above its own; within a package there are no cycles."""

ROWS = {
    part: number for number, row in enumerate(LAYERS.strip().splitlines()) for part in row.split()
}


@cache
def modules() -> dict[str, ast.Module]:
    """Parse every module of rpcmp, by name: "rpcmp.worker.stage"."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return all nodes of a module except imports for type checkers only."""
    found: list[ast.AST] = [modules()[module]]
    for node in found:  # which grows
        found += [
            child
            for child in ast.iter_child_nodes(node)
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ]
    return found


@cache
def imported_names(module: str) -> set[str]:
    """Return the dotted names that a module imports, at its top or inside functions."""
    return names_imported_by(nodes(module), module)


def names_imported_by(nodes: Iterable[ast.AST], importer: str) -> set[str]:
    """Return the dotted names that nodes import; fails on relative imports."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def attributes(module: str) -> set[str]:
    """Return the dotted expressions of a module, such as "torch.nn.Linear"."""
    found = (dotted(node) for node in nodes(module) if isinstance(node, ast.Attribute))
    return {name for name in found if name}


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression; empty for any other expression."""
    if not isinstance(node, ast.Attribute):
        return node.id if isinstance(node, ast.Name) else ""
    above = dotted(node.value)
    return above and f"{above}.{node.attr}"


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of rpcmp that a module imports."""
    found = (_module_of(name) for name in imported_names(module) if name.split(".")[0] == "rpcmp")
    return frozenset(found) - {module}


def _module_of(name: str) -> str:
    """Return the module of a dotted name: "rpcmp.errors" for "rpcmp.errors.JobError"."""
    while name not in modules() and f"{name}.__init__" not in modules():
        name = name.rpartition(".")[0]
    return name if name in modules() else f"{name}.__init__"


def needs(module: str, found: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return all that a module imports, directly or not."""
    for other in imports(module) - found:
        found = needs(other, found | {other})
    return found


def part(module: str) -> str:
    """Return the entry of LAYERS that a module belongs to."""
    return module.split(".")[1]


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        for other in imports(module)
        if part(module) != part(other) and ROWS[part(module)] <= ROWS[part(other)]
    ]
    assert wrong == []


def test_no_module_needs_itself() -> None:
    assert [module for module in modules() if module in needs(module)] == []


def test_the_layers_name_every_module_and_no_other() -> None:
    assert set(ROWS) == {part(module) for module in modules()}


def test_no_module_of_tests_imports_another_test() -> None:
    """Shared helpers are in tests/support, or in tests/zoo if a job imports them."""
    tests = re.compile(r"tests\.(\w+\.)*(test_\w|conftest\b)")
    uses = []
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = names_imported_by(ast.walk(tree), str(path))
        uses += [f"{path.relative_to(TESTS)} imports {name}" for name in names if tests.match(name)]
    assert uses == []


def test_only_two_modules_print_on_a_terminal() -> None:
    ways = ("click.echo", "click.secho", "rich.print", "rich.console.Console")
    uses = {
        module
        for module in modules()
        for name in (*imported_names(module), *attributes(module))
        if name in ways
    }
    assert uses == {"rpcmp.cli.__init__", "rpcmp.cli.console"}


PRIVATE = {
    "rpcmp.worker.weight_grad uses torch._C._autograd._top_saved_tensors_default_hooks",
    "rpcmp.worker.weight_grad uses torch.jit._builtins._get_builtin_table",
}
"""Private names of torch outside of the transport; see unit/test_torch_contract.py."""


def test_only_the_transport_uses_rpc_and_private_names_of_torch() -> None:
    ours = re.compile(r"torch\.distributed\.(rpc|autograd)\b|torch\.(.*\.)?_(?!_)")
    uses = [
        f"{module} uses {name}"
        for module in modules()
        for name in (*imported_names(module), *attributes(module))
        if ours.match(name)
    ]
    assert any(use.startswith("rpcmp.rpc.transport ") for use in uses)
    others = [use for use in uses if not use.startswith("rpcmp.rpc.transport ")]
    assert [use for use in others if not any(one.startswith(use) for one in PRIVATE)] == []


def test_no_module_knows_one_kind_of_accelerator() -> None:
    """torch.accelerator and torch.get_device_module are the same for CUDA, ROCm, XPU and others."""
    kinds = re.compile(r"torch\.(cuda|xpu|mps|mtia)\b|.*\.is_cuda$")
    found = {(m, n) for m in modules() for n in (*imported_names(m), *attributes(m))}
    assert [each for each in found if kinds.match(each[1])] == []


COMPARED_PACKAGES = ("worker", "driver", "rpc.transport", "rpc.messages", "data.batch_server")
"""The packages that train across processes, which are compared with the reference in one."""


def test_the_reference_shares_no_module_with_the_packages_that_it_checks() -> None:
    needed = {
        other
        for module in modules()
        if module.startswith("rpcmp.tools.reference_")
        for other in needs(module)
    }
    assert "rpcmp.pipelining.layers" in needed
    compared = tuple(f"rpcmp.{name}" for name in COMPARED_PACKAGES)
    assert [name for name in needed if name.startswith(compared)] == []


def test_supervisors_and_the_command_line_do_not_import_torch() -> None:
    code = """
import importlib, sys
import rpcmp.cli, rpcmp.config.schema, rpcmp.job.training_run, rpcmp.job.server_calls
import rpcmp.cli.observing, rpcmp.observability.observers
import rpcmp.observability.dashboard.html_report, rpcmp.observability.dashboard.page_server
import rpcmp.server.lifecycle, rpcmp.server.stage_server, rpcmp.server.connection
import rpcmp.tools.bench.contestants, rpcmp.tools.diagnosis, rpcmp.tools.explain.gather
for module in rpcmp.cli.COMMANDS:
    importlib.import_module(f"rpcmp.cli.{module}")
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "[]"


@pytest.mark.parametrize(
    ("used", "unused"),
    [
        # Each of the stage servers that a run starts here imports anew.
        (
            ["rpcmp.cli.serve", "rpcmp.server.lifecycle", "rpcmp.server.stage_server"],
            ["pydantic", "rich", "safetensors", "torch"],
        ),
        # A run waits for what its fork server imports, which starts with `import torch`.
        (
            ["rpcmp.worker.process", "rpcmp.driver.process"],
            ["grpc", "networkx", "rich", "sympy", "torch._dynamo", "torch._inductor"],
        ),
        # The fork server starts before the config is read.
        (["rpcmp.cli.drive"], ["grpc", "pydantic", "rich"]),
    ],
)
def test_the_start_of_a_run_imports_only_what_it_uses(used: list[str], unused: list[str]) -> None:
    code = f"import sys, {', '.join(used)}; print([m for m in {unused} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "[]"


STAMPS = {
    "certificates, valid from a day before": ("cli.certs", "net.authority", "net.security"),
    "the age of checkpoints, in days": ("job.checkpoints",),
    "clocks of hosts, which are compared": ("server.link_speed", "tools.diagnosis"),
    "the time of an event or of a line": (
        *("cli.__init__", "cli.observing", "process.logging.records"),
        *("observability.events.training_events", "observability.observers"),
        *("observability.run_folder", "observability.run_metrics", "observability.tensorboard"),
    ),
}
"""Modules that read the wall clock, and what for."""


def test_no_run_depends_on_the_wall_clock() -> None:
    """It may be set an hour forward or back at any time: what waits uses `time.monotonic`."""
    reads = {"time.time", "datetime.now", "datetime.utcnow", "date.today", "time.time_ns"}
    found = {
        name.removeprefix("rpcmp.")
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in reads
    }
    assert found == {name for names in STAMPS.values() for name in names}


def test_the_generated_files_match_the_protos(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy")]
    outputs.append(f"--mypy_grpc_out={tmp_path}")
    plugins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs]
        + [str(path) for path in sorted(PROTOS.rglob("*.proto"))],
        env={**os.environ, "PATH": plugins},
        check=True,
        timeout=60,
    )
    generated = {path.name: path.read_text() for path in (tmp_path / "rpcmp/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (PACKAGE / "v1").glob("*_pb2*")}
    assert sorted(generated) == sorted(committed)
    for name, text in generated.items():
        assert committed[name] == text, f"{name} is out of date"


@pytest.mark.parametrize("package", sorted(path.parent for path in PACKAGE.rglob("__init__.py")))
def test_the_introduction_of_a_package_names_files_that_it_has(package: Path) -> None:
    introduction = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = re.findall(r"`([a-z_0-9]+(?:\.py|/))`", introduction)
    assert [name for name in named if not (package / name).exists()] == []
