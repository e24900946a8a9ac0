"""The import order of packages and tests, their size, and that generated files are up to date."""

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
above its own, for type checkers too; see CIRCLES for what imports each other within a package."""

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
def lines(module: str) -> int:
    """Return the number of a module's lines."""
    return (
        (PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8").count("\n")
    )


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return all nodes of a module."""
    return list(ast.walk(modules()[module]))


@cache
def imported_names(module: str) -> set[str]:
    """Return the dotted names that a module imports, in functions and for type checkers too."""
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
    """Return the modules of rpcmp that a module imports.

    The package itself imports none of them: it loads each public name when that is first used.
    """
    if module == "rpcmp.__init__":
        return frozenset()
    found = (_module_of(name) for name in imported_names(module) if name.split(".")[0] == "rpcmp")
    return frozenset(found) - {module}


def _module_of(name: str) -> str:
    """Return the module of a dotted name: "rpcmp.errors" for "rpcmp.errors.JobError"."""
    while name not in modules() and f"{name}.__init__" not in modules():
        name = name.rpartition(".")[0]
    return name if name in modules() else f"{name}.__init__"


@cache
def needs(module: str) -> frozenset[str]:
    """Return all that a module imports, directly or not."""
    found: set[str] = set()
    asked = [module]
    while asked:
        new = imports(asked.pop()) - found
        found |= new
        asked += new
    return frozenset(found)


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


CIRCLES = {
    "config.cross_checks config.schema": "a config is checked as a whole when it is made",
    "server.services server.stage_server": "a server opens its services, and these call it",
}
"""Modules that import each other, for type checkers or not, and why. The table may only shrink: a
class takes what it needs instead of its owner, or a type moves to the lower module."""


def test_only_known_modules_import_each_other() -> None:
    found = {
        frozenset(other for other in needs(module) if module in needs(other))
        for module in modules()
        if module in needs(module)
    }
    known = {frozenset(f"rpcmp.{name}" for name in circle.split()) for circle in CIRCLES}
    assert sorted(map(sorted, found)) == sorted(map(sorted, known)), "see CIRCLES"
    assert len(CIRCLES) <= 2


def test_the_layers_name_every_module_and_no_other() -> None:
    assert set(ROWS) == {part(module) for module in modules()}


ENTRIES = ("cli.serve", "job.training_run", "worker.process", "driver.process")
"""The modules that serve a stage and drive a job, with all that they import."""

AT_MOST = {
    "modules that serve and drive": (
        235,
        "what a second forward shows; what two stages have of one variable",
    ),
    "lines that serve and drive": (
        55_070,
        "what a second forward shows; what two stages have of one variable",
    ),
    "lines of the top": (590, ""),
    "lines of checkpoint": (2_070, "a file from a peer needs room and a name that a run makes"),
    "lines of cli": (3_970, ""),
    "lines of config": (3_020, "what a callable holds, for losses and layers"),
    "lines of data": (2_000, ""),
    "lines of driver": (4_660, "a module that is too large for a proof is compared part by part"),
    "lines of job": (
        6_850,
        "cuts are kept by the supervisor; a driver's record is signed, and believed if it is",
    ),
    "lines of net": (
        4_580,
        "signatures on a driver's record; a replaced authority ends connections",
    ),
    "lines of observability": (5_460, ""),
    "lines of pipelining": (
        5_390,
        "a scheduler that reads all parameters is refused like an optimizer",
    ),
    "lines of process": (4_900, "priorities and processors of others; what peers may fill"),
    "lines of rpc": (2_230, "a step report says which variables outside of modules change"),
    "lines of server": (
        4_690,
        "doctor builds modules on each host; what a driver has signed is kept",
    ),
    "lines of splitting": (
        3_790,
        "operations that hosts without code run are a list, and checked by torch's schemas",
    ),
    "lines of tools": (5_760, "verify trains on whole mini-batches as well"),
    "lines of worker": (
        9_520,
        "what a second forward shows; what two stages have of one variable",
    ),
}
"""How many modules and lines there may be. A commit that raises a number says beside it why."""

FEWER = 0.04
"""Share by which there may be fewer before the number has to be lowered, so that it stays true."""


def counted() -> list[str]:
    """Return the modules whose lines count: neither generated nor examples."""
    return [module for module in modules() if part(module) not in ("v1", "examples")]


def sizes() -> dict[str, int]:
    """Return the present numbers, by the entries of AT_MOST."""
    entries = [f"rpcmp.{name}" for name in ENTRIES]
    reached = frozenset(entries).union(*map(needs, entries)).intersection(counted())
    found = {
        "modules that serve and drive": len(reached),
        "lines that serve and drive": sum(map(lines, reached)),
    }
    for module in counted():
        name = f"lines of {part(module) if module.count('.') > 1 else 'the top'}"
        found[name] = found.get(name, 0) + lines(module)
    return found


def test_the_package_does_not_grow_unseen() -> None:
    now = sizes()
    assert sorted(now) == sorted(AT_MOST)
    for name, (most, _) in AT_MOST.items():
        assert now[name] <= most, (
            f"{name}: {now[name]:,}, which is {now[name] - most} more than in AT_MOST: take out as "
            "many, import fewer, or raise the number and say beside it why"
        )
        assert now[name] >= (1 - FEWER) * most, (
            f"{name}: {now[name]:,}, far fewer than in AT_MOST: lower the number there"
        )


def test_no_two_classes_have_one_name() -> None:
    """Nor do they differ by an underscore only."""
    found: dict[str, list[str]] = {}
    for module in counted():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.strip("_"), []).append(f"{module}.{node.name}")
    assert [classes for classes in found.values() if len(classes) > 1] == []


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
    "certificates, valid from a day before": (
        *("cli.certs", "net.authority", "net.security", "net.signatures"),
    ),
    "the age of checkpoints, in days; which of two runs is newer": ("job.checkpoints",),
    "how long a record or an invitation holds": (
        *("job.driver_record", "job.server_calls", "job.takeover"),
    ),
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
