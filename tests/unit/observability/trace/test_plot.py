"""The pipeline diagram."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.observability.trace import plot
from rpcmp.observability.trace.spans import choose_window
from tests.support.traces import SLOW_LINKS, ZERO_BUBBLE, drawn


def test_every_span_has_a_box_of_its_kinds_colour_and_its_micro_batch() -> None:
    from matplotlib.colors import to_hex  # a slow import

    trace = drawn(ZERO_BUBBLE)
    axes = plot.figure(trace, choose_window(trace, 2)).axes[0]
    drawn_boxes = Counter(
        to_hex(found.get_facecolor()[0]).upper()  # type: ignore[arg-type]
        for found in axes.collections
        for _ in found.get_paths()
    )
    spans = Counter(span.kind for track in trace.tracks for span in track.spans if span.step == 2)
    assert drawn_boxes == {plot.COLOURS[kind]: number for kind, number in spans.items()}
    assert [text.get_text() for text in axes.texts] == [*"010011", *"001101"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage0", "stage1"]


def test_title_and_legend_describe_steps_bubble_and_actions() -> None:
    trace = drawn(SLOW_LINKS)
    figure = plot.figure(trace, choose_window(trace, 1))
    assert figure.axes[0].get_title() == "steps 1 to 2, 12.5 ms each, bubble 28.0%"
    assert figure.axes[0].get_xlim() == (0, 25)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["forward", "backward", "optimizer"]


def test_plot_leaves_out_numbers_that_do_not_fit() -> None:
    trace = drawn(f"stage0 F0 {'. ' * 300} B0")
    assert list(plot.figure(trace, choose_window(trace)).axes[0].texts) == []


def test_plot_is_a_png_for_any_file_name(tmp_path: Path) -> None:
    trace = drawn(SLOW_LINKS)
    plot.write_png(trace, choose_window(trace), tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")


def test_error_explains_how_to_install_matplotlib_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'rpcmp\[plot\]'"):
        plot.write_png(drawn(SLOW_LINKS), choose_window(drawn(SLOW_LINKS)), tmp_path / "a.png")


def test_error_names_a_diagram_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the diagram .*: Is a directory"):
        plot.write_png(drawn(SLOW_LINKS), choose_window(drawn(SLOW_LINKS)), tmp_path)
