"""The files of the page, and the report: the page of one or several runs as a single file.

The live page loads its modules one by one. A report has to be a single file, since a browser does
not import modules from a disk; so each module becomes a function in it:

    import { h } from "./dom.js";        const { h } = modules["dom.js"];
    export { curves };                   return { curves };
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from rpcmp.observability.dashboard.state import State
from rpcmp.observability.run_report import Record, compare, tables

FOLDER = files("rpcmp.observability.dashboard") / "assets"

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types of the files that are served; other files are not served."""

MAIN = "main.js"

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z_]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (\{[^}]*\});$", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script (?:defer|type="module") src="([^"]+)"></script>')


def load() -> dict[str, bytes]:
    """Return all files that are served, by their path on the server."""
    contents = {}
    for folder, prefix in ((FOLDER, ""), (FOLDER / "vendor", "vendor/")):
        for file in folder.iterdir():
            if any(file.name.endswith(ending) for ending in KINDS):
                contents[prefix + file.name] = file.read_bytes()
    return contents


def media_type(path: str) -> str:
    return KINDS[f".{path.rpartition('.')[2]}"]


def html(runs: Sequence[Record]) -> str:
    """Return a page that shows `runs`; it needs no network and no other files."""
    data: dict[str, Any] = {"runs": [{"name": run.name, "state": _state(run)} for run in runs]}
    if len(runs) > 1:
        comparison = compare(runs)
        data["comparison"] = {
            "tables": [asdict(table) for table in tables(comparison)],
            "verdict": comparison.verdict,
        }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no text of a run can end the script
    script = f'<script type="application/json" id="data">{text}</script>\n</body>'
    return _single_file().replace("</body>", script)


def _state(run: Record) -> dict[str, Any] | None:
    state = State()
    for event in run.events:
        state.apply(event)
    return state.since(None)


def _single_file() -> str:
    """Return the page with all of its files in it."""
    files = load()
    texts = {path: content.decode() for path, content in files.items()}
    icon = base64.b64encode(files["icon.svg"]).decode()
    page = texts["index.html"].replace(
        'href="icon.svg"', f'href="data:image/svg+xml;base64,{icon}"'
    )
    page = _STYLE.sub(lambda match: f"<style>\n{texts[match[1]]}\n</style>", page)
    return _SCRIPT.sub(lambda match: _script(match[1], texts), page)


def _script(path: str, texts: dict[str, str]) -> str:
    if path != MAIN:
        return f'<script type="text/javascript">\n{texts[path]}\n</script>'
    return f'<script type="module">\n{_bundle(texts)}\n</script>'


def _bundle(texts: dict[str, str]) -> str:
    """Return MAIN and all modules that it imports, directly or not, as one script."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for match in _IMPORT.finditer(texts[name]):
                visit(match[2])
            order.append(name)

    visit(MAIN)
    script = ["const modules = {};"]
    for name in order:
        code = _IMPORT.sub(r'const \1 = modules["\2"];', texts[name])
        code = _EXPORT.sub(r"return \1;", code)
        script.append(f'modules["{name}"] = (() => {{\n{code}}})();')
    return "\n".join(script)
