"""The lazy replacement of torch._dynamo: optimizers do not import it, compiling does.

The replacement affects a whole process, so these tests run in processes of their own. Importing
torch._dynamo takes as long as importing torch, so a single process does everything that needs the
real module. The ways to import it are tested in forks of that process, with a small package that
takes its place. tests/long/test_lazydynamo.py tests them with the real module.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.support.dynamo import ASK, BEFORE, DEFER, IMPORTS, REAL, output_of

# With the real module

WHOLE = """
kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)
         and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
def bits():
    for kind in kinds:
        if kind in (torch.optim.SparseAdam, torch.optim.Muon):
            continue
        layer, found, closure = optimizer(kind)
        for _ in range(2):
            found.step(closure)
        state = found.state_dict()
        found.load_state_dict(state)
        found.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}
                              ) if kind is not torch.optim.LBFGS else None
        yield kind.__name__, layer.weight.detach().numpy().tobytes()
facts = {}
without = dict(bits())
layer, made, closure = optimizer()
made.step(closure)
facts["is there without compiling"] = is_there()
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
def both(x):
    y = x + 1
    made.zero_grad()
    return y * 2
facts["computed"] = torch.compile(both, backend=backend)(torch.ones(1)).item()
facts["graphs"] = len(graphs)
facts["is there"] = is_there()
facts["calls"] = [
    [(each.name, each.default) for each in inspect.signature(call).parameters.values()][:most]
    for call, most in [
        (torch._dynamo.disable, 2), (lazy_dynamo._Deferred.disable.__get__(0), 2),
        (torch._dynamo.graph_break, 1), (lazy_dynamo._Deferred.graph_break.__get__(0), 1),
    ]
]
facts["is real"] = [torch._dynamo is sys.modules["torch._dynamo"], type(torch._dynamo).__name__]
facts["optimizers"] = len(without)
facts["same bits"] = dict(bits()) == without
print(json.dumps(facts))
"""


# Ways to import it

DISABLE = """
lazy_dynamo.defer_dynamo()
class Doubled(torch.nn.Linear):
    def twice(self, x):
        return doubled(x)
def doubled(x):
    return 2 * x
module, disable = Doubled(1, 1), torch.compiler.disable
calls = [disable(doubled), disable(doubled, recursive=False), disable(module.twice)]
print(json.dumps([[call(3) for call in calls], [call.__name__ for call in calls], is_there()]))
others = [((), {}), ((), {"recursive": False}), ((Doubled,), {}), ((module,), {"reason": "none"})]
same = [disable(*others, **more) == (*(others or [None]), more.get("recursive", True),
                                     {"reason": more.get("reason")}) for others, more in others]
print(json.dumps([same, is_there()]))
"""
"""Disable functions, which does not import torch._dynamo, and then other objects, which does."""

IMPORTED = """
import torch._dynamo.utils
lazy_dynamo.defer_dynamo()
print(json.dumps([is_there(), type(torch._dynamo).__name__, lazy_dynamo._FINDER in sys.meta_path]))
"""

STAND_IN = {
    "__init__.py": "import torch._dynamo.eval_frame\nfrom .eval_frame import disable, graph_break",
    "eval_frame.py": """
from torch._dynamo import utils
def disable(fn=None, recursive=True, **options): return fn, recursive, options
def graph_break(msg=""): pass
""",
    "utils.py": "",
}
FORK_EACH = """
folder, codes = sys.argv[1:]
for code in json.loads(codes):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        torch.__path__.insert(0, folder)
        exec(code, globals())
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, code
"""


class Found(NamedTuple):
    """The results of a process that forks for each code, and then continues by itself.

    Attributes:
        asked: from the forks that import torch._dynamo in some way, before or after a step.
        disabled: from the fork that disables functions, and then other objects.
        imported_first: from the fork that imports torch._dynamo before `defer_dynamo`.
        imported_later: from the fork that imports it after `defer_dynamo`, and defers it again.
        facts: from the process, which steps with every optimizer, compiles, and steps again.
    """

    asked: list[Any]
    disabled: list[Any]
    imported_first: list[Any]
    imported_later: list[Any]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of a single process."""
    package = tmp_path_factory.mktemp("torch") / "_dynamo"
    package.mkdir()
    for name, text in STAND_IN.items():
        (package / name).write_text(text)
    asked = [DEFER + ASK.format(before=before, use=use) for use in IMPORTS for before in BEFORE]
    codes = [*asked, DISABLE, IMPORTED, DEFER + IMPORTED]
    *answers, functions, others, first, later, facts = output_of(
        FORK_EACH + DEFER + WHOLE, str(package.parent), json.dumps(codes)
    )
    return Found(answers, [functions, others], first, later, facts)


def test_every_torch_optimizer_steps_without_dynamo_with_the_same_bits(found: Found) -> None:
    assert not found.facts["is there without compiling"]
    assert found.facts["optimizers"] > 10
    assert found.facts["same bits"]


def test_compiling_loads_the_real_dynamo(found: Found) -> None:
    assert found.facts["is there"]
    assert found.facts["is real"] == [True, "module"]


def test_a_graph_excludes_an_optimizer_that_existed_before_it(
    found: Found,
) -> None:
    """As with the real module, `zero_grad` is not compiled: it breaks the graph in two."""
    assert found.facts["computed"] == 4.0
    assert found.facts["graphs"] == 2


def test_disable_imports_dynamo_unless_it_gets_a_function(found: Found) -> None:
    functions, others = found.disabled
    assert functions == [[6, 6, 6], ["doubled", "doubled", "twice"], False]
    assert others == [[True] * 4, True]


def test_a_replacement_is_called_unchanged(found: Found) -> None:
    disable, ours, graph_break, our_graph_break = found.facts["calls"]
    assert ours == disable == [["fn", None], ["recursive", True]]
    assert our_graph_break == graph_break == [["msg", ""]]


def test_the_lazy_module_replaces_dynamo_before_and_after_a_step(found: Found) -> None:
    assert found.asked == REAL * len(IMPORTS) * len(BEFORE)


def test_an_already_imported_dynamo_stays(found: Found) -> None:
    assert found.imported_first == [True, "module", False]
    assert found.imported_later == [True, "module", True]
