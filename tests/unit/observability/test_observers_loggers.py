"""Loggers: the examples of the guide as they are written there, and the errors of bad ones.

These tests start no processes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rpcmp.cli.observing import create_observers
from rpcmp.config.schema import Config
from rpcmp.errors import FactoryError
from rpcmp.observability.events import Event, StartEvent, WarningEvent
from rpcmp.observability.observers import watching
from tests.support import runs
from tests.support.docs import block, guide
from tests.support.runevents import typed

LOSSES = [2.0, 1.0]
MODULE = "my_logs"


class Recorder(ModuleType):
    """A module or object whose every attribute is a function that records its calls."""

    def __init__(self, name: str, calls: list[tuple[str, Any, Any]]) -> None:
        super().__init__(name)
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self.__name__}.{name}", self._calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:
        self._calls.append((self.__name__, args, kwargs))
        return self


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop(MODULE, None)


def with_loggers(folder: Path, code: str, *loggers: Any) -> Config:
    """Return a config in `folder` with these loggers, beside a module that contains `code`."""
    (folder / f"{MODULE}.py").write_text(code)
    return runs.config(folder, log={"folder": "", "loggers": list(loggers)})


def test_loggers_of_the_guide_log_to_wandb_and_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any, Any]] = []
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, Recorder(name, calls))
    log = tomllib.loads(block("toml", "[log]\nloggers", guide("runs")))["log"]
    of = with_loggers(tmp_path, block("python", f"# {MODULE}.py", guide("runs")), *log["loggers"])
    report_all(of, lambda event: None)
    wandb = [call for call in calls if call[0].startswith("wandb")]
    assert wandb[0] == ("wandb.init", (), {"project": "digits", "name": "job"})
    assert wandb[1] == ("wandb.init.config.update", (of.model_dump(mode="json"),), {})
    assert [(args[0]["loss"], kwargs) for _, args, kwargs in wandb[2:4]] == [
        (2.0, {"step": 1}),
        (1.0, {"step": 2}),
    ]
    evaluation = {"eval/loss": 0.5, "eval/accuracy": 0.9}
    assert wandb[4:] == [
        ("wandb.init.log", (evaluation,), {"step": 2}),
        ("wandb.init.finish", (), {"exit_code": 0}),
    ]
    mlflow = [call for call in calls if call[0].startswith("mlflow")]
    assert mlflow[:2] == [
        ("mlflow.set_experiment", ("digits",), {}),
        ("mlflow.start_run", (), {"run_name": "job"}),
    ]
    assert [kwargs["step"] for _, _, kwargs in mlflow[2:5]] == [1, 2, 2]
    assert mlflow[4][1] == (evaluation,)
    assert mlflow[5:] == [("mlflow.active_run", (), {}), ("mlflow.end_run", ("FINISHED",), {})]


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("", "f", "log.loggers.0 = 'my_logs:f' does not import: AttributeError"),
        ("import nowhere", "f", "No module named 'nowhere'"),
        ("f = 3", "f", "log.loggers.0 = 'my_logs:f' is int, not callable"),
        ("def f(config): return 3", "f", "returned int; it has to return a function that takes"),
        ("def f(): pass", "f", "log.loggers.0 = 'my_logs:f' failed: TypeError"),
        ("def f(config): raise OSError('no key')", "f", "failed: OSError: no key"),
    ],
)
def test_loggers_raise_before_the_run_if_one_cannot_be_created(
    tmp_path: Path, code: str, name: str, said: str
) -> None:
    of = with_loggers(tmp_path, code, f"{MODULE}:{name}")
    of = of.model_copy(update={"log": of.log.model_copy(update={"folder": "runs"})})
    with pytest.raises(FactoryError) as error:
        create_observers(of)
    assert said in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_loggers_create_none_if_one_cannot_be_imported(tmp_path: Path) -> None:
    code = "from pathlib import Path\ndef f(config): Path(config.folder, 'made').touch()"
    of = with_loggers(tmp_path, code, f"{MODULE}:f", f"{MODULE}:missing")
    with pytest.raises(FactoryError, match=r"log\.loggers\.1"):
        create_observers(of)
    assert not (tmp_path / "made").exists()


def test_logger_gets_a_copy_of_each_event(tmp_path: Path) -> None:
    of = with_loggers(tmp_path, "def f(config): return dict.clear", f"{MODULE}:f")
    shown: list[Event] = []
    with watching(create_observers(of), shown.append) as report:
        report(StartEvent(steps=3))
    assert shown[0] == StartEvent(steps=3)


def test_logger_that_raises_is_dropped_with_its_place_in_the_code(tmp_path: Path) -> None:
    code = "def f(config):\n    def tell(event):\n        raise OSError('no net')\n    return tell"
    of = with_loggers(tmp_path, code, f"{MODULE}:f")
    shown: list[Event] = []
    report_all(of, shown.append)
    (warning,) = [event.text for event in shown if isinstance(event, WarningEvent)]
    assert warning.startswith("the logger 'my_logs:f' failed: OSError: no net")
    assert 'my_logs.py", line 3' in warning


def report_all(of: Config, show: Callable[[Event], None]) -> None:
    with watching(create_observers(of), show) as report:
        for event in runs.events(of, LOSSES)[:-1]:
            report(typed(event))
