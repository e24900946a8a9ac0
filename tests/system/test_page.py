"""The page in a real browser, for a real run and for made-up ones."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect
from playwright.sync_api import Page as Tab

from rpcmp.net import authority, identity
from rpcmp.observability.dashboard.history import MAX_ENTRIES as LINES
from rpcmp.observability.dashboard.history import MAX_ROWS as ROWS
from rpcmp.observability.dashboard.html_report import html
from rpcmp.observability.dashboard.page_server import Endpoint, LivePage
from tests.support import pageevents
from tests.support.browsers import chromium, opened
from tests.support.pageevents import Event
from tests.support.processes import JobFolder, Server, connect, describe, poll_for, running
from tests.support.runevents import typed

expect.set_options(timeout=30_000)  # this machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextlib.contextmanager
def serving(
    events: Iterable[Event], place: Endpoint | None = None
) -> Iterator[tuple[LivePage, str]]:
    """Serve a page with these events; yields it and its address."""
    place = place or Endpoint.open("127.0.0.1:0", None)
    page = LivePage(place)
    try:
        for event in events:
            page.handle(typed(event))
        yield page, place.url
    finally:
        page.close()


def going_on(num_steps: int, lost_after: int | None = None) -> list[Event]:
    """Return the events of an unfinished run."""
    found = pageevents.run(num_steps, lost_after)
    return [event for event in found if event["event"] not in ("summary", "end")]


def node(tab: Tab, name: str) -> Locator:
    return tab.locator(f'.node[data-key="{name}"]')


def picture(tab: Tab, chart: str) -> str:
    """Return a chart as an image."""
    found: str = tab.locator(f"{chart} canvas").evaluate("canvas => canvas.toDataURL()")
    return found


def is_too_wide(tab: Tab) -> bool:
    found: bool = tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    return found


WATCH_STATES = """name => {
    const node = document.querySelector(`.node[data-key="${name}"]`);
    window.states = [node.dataset.state];
    new MutationObserver(() => window.states.push(node.dataset.state))
        .observe(node, { attributes: true, attributeFilter: ["data-state"] });
}"""


def test_the_page_follows_a_run_through_a_fault_to_its_end(
    browser: Browser, job: JobFolder, servers: list[Server]
) -> None:
    config = job.config("""
        steps = 100000
        evaluate_every_steps = 10
        [model]
        layers = "zoo:lopsided"
        kwargs = { milliseconds = 4.0 }
        balance = [2, 3]
        [data]
        train = "zoo:regression"
        test = { callable = "zoo:regression", kwargs = { samples = 7 } }
        batch_size = 20
        [optimizer]
        callable = "torch.optim:SGD"
        kwargs = { lr = 0.001 }
        groups = [{ match = ["*.bias"], lr = 0.002 }]
    """)
    command = ("drive", config, "--json", "--ui", "127.0.0.1:0", "--connect", connect(servers))
    with running(*command) as run:
        url = run.wait_for_line(r'"event": "ui", "url": "(http://127\.0\.0\.1:\d+/)"')[1]
        with opened(browser, url) as (tab, seen):
            _sees_it_train(tab)
            _sees_a_stage_come_back(tab, servers[1])
            run.process.send_signal(signal.SIGINT)
            result = run.wait()
            _keeps_what_it_has(tab)
            assert seen.errors == []
            assert {address.startswith(url) for address in seen.requests} == {True}
    assert result.code == 128 + signal.SIGINT
    assert "Traceback" not in result.err
    assert "Exception" not in result.err


def _sees_it_train(tab: Tab) -> None:
    expect(tab.locator("#status")).to_have_text("training")
    for name in ("stage0", "stage1"):
        expect(node(tab, name)).to_have_attribute("data-state", "running")
        expect(node(tab, name).locator(".facts")).to_contain_text("MiB")
    expect(tab.locator("#loss-reading")).to_have_text(re.compile(r"step [\d,]+: [\d.]"))
    expect(tab.locator("dd", has_text="0.001 · 0.002")).to_be_visible()
    for chart in ("#loss", "#rate"):
        _moves(tab, chart)
    expect(tab.locator("#timeline canvas")).to_be_visible()
    expect(tab.locator("#bottleneck")).to_contain_text("Bottleneck: stage1 computes")
    expect(tab.locator("#shares tbody tr")).to_have_count(2)
    expect(tab.locator(".rate").last).to_contain_text(re.compile("iB/s"))
    expect(tab.locator(".event.evaluation").first).to_contain_text("loss")


def _moves(tab: Tab, chart: str) -> None:
    before = picture(tab, chart)
    poll_for(lambda: picture(tab, chart) != before, f"{chart} to move")


def _sees_a_stage_come_back(tab: Tab, server: Server) -> None:
    tab.evaluate(WATCH_STATES, "stage1")
    killed = describe(server).worker_pid
    os.kill(killed, signal.SIGKILL)
    poll_for(lambda: "lost" in tab.evaluate("states"), "the stage to be lost")
    poll_for(lambda: tab.evaluate("states")[-1] == "running", "the stage to come back")
    expect(tab.locator("#status")).to_have_text("training")
    expect(tab.locator(".event.fault").first).to_contain_text("stage1")
    begun = tab.locator(".event.generation", has_text="generation 2 starts")
    expect(begun).to_have_count(1)
    assert describe(server).worker_pid not in (0, killed)
    step = tab.locator("#steps").inner_text()
    expect(tab.locator("#steps")).not_to_have_text(step)


def _keeps_what_it_has(tab: Tab) -> None:
    expect(tab.locator("#connection")).to_have_text("The run has ended")
    expect(tab.locator("#status")).to_have_text("interrupted")
    expect(tab.locator("#notice")).to_contain_text("The run was interrupted")
    expect(node(tab, "stage1")).to_have_attribute("data-state", "ended")
    expect(tab.locator("#loss-reading")).to_have_text(re.compile(r"step [\d,]+: [\d.]"))
    tab.locator("#log").check()  # what it has can still be looked at
    expect(tab.locator("#loss canvas")).to_be_visible()


def test_a_lost_stage_is_shown_by_color_sign_and_text(browser: Browser) -> None:
    with serving(going_on(20)) as (page, url), opened(browser, url) as (tab, seen):
        coarse = node(tab, "coarse")
        expect(coarse.locator(".state")).to_have_text("● running")
        calm = coarse.evaluate("node => getComputedStyle(node).borderTopColor")
        page.handle(typed(pageevents.fault(20)))
        expect(coarse).to_have_attribute("data-state", "lost")
        expect(coarse.locator(".state")).to_have_text("✕ lost")
        expect(coarse).to_have_attribute("aria-label", re.compile("coarse, lost"))
        lost = coarse.evaluate("node => getComputedStyle(node.querySelector('.state')).color")
        red, green, blue = map(int, re.findall(r"\d+", lost)[:3])
        assert red > 2 * max(green, blue)
        assert calm != lost
        expect(tab.locator("#status")).to_have_text("recovering")
        expect(node(tab, "fine")).to_have_attribute("data-state", "running")
        again = {"event": "generation", "generation": 2, "step": 20, "workers": {}}
        page.handle(typed(again))
        expect(coarse).to_have_attribute("data-state", "running")
        assert seen.errors == []


def test_nodes_and_shares_describe_each_worker(browser: Browser) -> None:
    with serving(going_on(20)) as (_, url), opened(browser, url) as (tab, seen):
        fine, lift = node(tab, "fine"), node(tab, "lift")
        expect(fine.locator(".where")).to_have_text("host-a · cpu")
        expect(fine.locator(".facts")).to_have_text("300 MiB · 4 in flight")
        expect(fine.locator(".share")).to_have_text("50 %")
        expect(lift.locator(".where")).to_have_text(["0 ● host-c · cpu", "1 ● host-d · cpu"])
        expect(lift.locator(".share")).to_have_text(["66 %", "74 %"])
        row = tab.locator("#shares tbody tr", has_text="coarse")
        expect(row.locator("td.numbers")).to_have_text(["32 %", "12 %", "6 %", "52 %"])
        expect(row.locator(".kind-bubble")).to_have_attribute("title", "idle: bubble 32 %")
        assert seen.errors == []


def test_a_page_reports_a_lost_run_and_follows_the_next_one(browser: Browser) -> None:
    place = Endpoint.open("127.0.0.1:0", None)
    page, port = LivePage(place), place.port
    for event in going_on(20):
        page.handle(typed(event))
    with opened(browser, place.url) as (tab, _):
        expect(tab.locator("#connection")).to_have_text("Live")
        page._server.close()  # without a last message, as if it had been killed
        expect(tab.locator("#connection")).to_have_text("No answer; trying again")
        expect(tab.locator("#steps")).to_contain_text("Step 20")
        with serving(going_on(5), Endpoint.open(str(port), None)):
            expect(tab.locator("#connection")).to_have_text("Live")
            expect(tab.locator("#steps")).to_contain_text("Step 5 of 5")
            expect(tab.locator("#loss-reading")).to_contain_text("step 5:")


def test_the_page_stays_small_and_live_over_10000_steps(browser: Browser) -> None:
    long = going_on(10_000, lost_after=300)
    with serving(long) as (page, url), opened(browser, url) as (tab, seen):
        expect(tab.locator("#steps")).to_contain_text("Step 10,000 of 10,000")
        expect(tab.locator("#loss-reading")).to_contain_text("step 10,000:")
        for event in going_on(10_400)[-600:]:
            page.handle(typed(event))
        expect(tab.locator("#loss-reading")).to_contain_text("step 10,400:")
        assert tab.locator("*").count() < 4 * LINES + 1000
        assert tab.locator("#events li").count() == LINES
        expect(tab.locator(".event.fault")).to_have_count(0)  # older than the newest lines
        for kind in ("evaluation", "checkpoint", "run", "generation"):
            tab.locator(f".chip.{kind}").click()
        expect(tab.locator(".event.fault")).to_have_count(1)
        assert seen.errors == []
    assert ROWS <= 4000


def test_everything_can_be_done_by_keyboard(browser: Browser) -> None:
    with serving(going_on(40)) as (_, url), opened(browser, url) as (tab, seen):
        expect(tab.locator("#timeline canvas")).to_be_visible()
        tab.keyboard.press("Tab")
        expect(tab.locator(".skip")).to_be_focused()
        tab.keyboard.press("Enter")
        expect(tab.locator("main")).to_be_focused()
        reached = []
        for _step in range(60):
            tab.keyboard.press("Tab")
            if tab.evaluate("document.activeElement === document.body"):
                break  # all have been visited
            name, outline = tab.evaluate(FOCUSED)
            reached.append(name)
            assert outline != "none", f"no visible focus on {name}"
        for wanted in ("log", "smoothing", "loss", "rate", "stages-as", "driver", "fine", "lift"):
            assert wanted in reached, reached
        for wanted in ("finish", "timeline", "hold", "events", "faults"):
            assert any(wanted in name for name in reached), reached

        tab.locator("#loss").focus()
        tab.keyboard.press("Home")
        expect(tab.locator("#loss-reading")).to_contain_text("step 1:")
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#loss-reading")).to_contain_text("step 2:")

        tab.locator("#timeline").focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#span")).to_have_text(re.compile("fine: forward of micro-batch 0, 9.5"))
        tab.keyboard.press("ArrowDown")
        expect(tab.locator("#span")).to_contain_text("coarse: forward of micro-batch 0")
        whole = picture(tab, "#timeline")
        tab.keyboard.press("+")
        poll_for(lambda: picture(tab, "#timeline") != whole, "the diagram to be zoomed")

        tab.locator("[name=stages-as][value=graph]").focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#stage-table")).to_be_visible()
        row = tab.locator("#stage-table tbody tr", has_text="lift:1")
        expect(row).to_contain_text("running")
        expect(row).to_contain_text("420 MiB")
        assert seen.errors == []


def test_a_worker_shows_its_device_and_its_memory_there(browser: Browser) -> None:
    place = {"address": "host-a:50051", "host": "host-a", "pid": 4000, "device": "cuda:1"}
    found = pageevents.vitals(21, generation=2)
    found["workers"]["fine"]["device_memory"] = 3 * 2**30
    with serving(going_on(20)) as (page, url), opened(browser, url) as (tab, seen):
        again = {"event": "generation", "generation": 2, "step": 20, "workers": {"fine": place}}
        page.handle(typed(again))
        page.handle(typed(found))
        fine = node(tab, "fine")
        expect(fine.locator(".where")).to_have_text("host-a · cuda:1")
        expect(fine.locator(".facts")).to_have_text("300 MiB · 3.0 GiB on cuda:1 · 4 in flight")
        tab.locator("[name=stages-as][value=graph]").focus()
        tab.keyboard.press("ArrowRight")
        row = tab.locator("#stage-table tbody tr", has_text="fine")
        expect(row.locator("td").nth(1)).to_have_text("host-a")
        expect(row.locator("td").nth(2)).to_have_text("cuda:1 · 3.0 GiB")
        assert seen.errors == []


FOCUSED = """() => {
    const element = document.activeElement;
    const isHidden = element.matches("input") && getComputedStyle(element).opacity === "0";
    const shown = isHidden ? element.nextElementSibling : element;
    const name = element.id || element.dataset.key || element.name || element.textContent.trim()
        || element.parentElement.textContent.trim();
    return [name.toLowerCase(), getComputedStyle(shown).outlineStyle];
}"""


def test_the_pointer_zooms_and_shows_a_tooltip(browser: Browser) -> None:
    with serving(going_on(40)) as (page, url), opened(browser, url) as (tab, _):
        over = tab.locator("#timeline .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        tab.mouse.move(box["x"] + 8, box["y"] + 20)
        expect(tab.locator("#span")).to_contain_text("fine: forward of micro-batch 0")
        tab.mouse.move(box["x"] + box["width"] - 60, box["y"] + 20)
        expect(tab.locator("#span")).to_contain_text("fine: idle, overhead")
        whole = picture(tab, "#timeline")
        tab.mouse.move(box["x"] + 100, box["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 300, box["y"] + 30, steps=4)
        tab.mouse.up()
        poll_for(lambda: picture(tab, "#timeline") != whole, "the diagram to be zoomed")

        tab.locator("#hold").check()
        page.handle(typed(pageevents.timeline(48)))
        page.handle(typed({"event": "warning", "text": "after the diagram"}))
        expect(tab.locator(".event").first).to_contain_text("after the diagram")
        expect(tab.locator("#timeline-title")).to_have_text("Step 40")
        tab.locator("#hold").uncheck()
        expect(tab.locator("#timeline-title")).to_have_text("Step 48")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser) -> None:
    begun = going_on(60, lost_after=30)
    with serving(begun) as (_, url), opened(browser, url, phone=True) as (tab, seen):
        expect(tab.locator("#timeline canvas")).to_be_visible()
        expect(node(tab, "finish")).to_be_visible()
        assert not is_too_wide(tab)
        tab.get_by_text("Table", exact=True).click()
        tab.locator(".config summary").click()
        expect(tab.locator("#config")).to_contain_text("batch_size")
        assert not is_too_wide(tab)
        for button in tab.locator("button").all():
            box = button.bounding_box()
            assert box is None or box["height"] >= 32
        assert seen.errors == []


CONTRASTS = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const found = parse(getComputedStyle(at).backgroundColor);
            if (found.length < 4 || found[3] > 0) return found;
        }
    };
    const isText = (node) => node.nodeType === 3 && node.data.trim();
    const texts = [...document.querySelectorAll("main *, header *")]
        .filter((element) => element.checkVisibility() && [...element.childNodes].some(isText));
    return texts.map((element) => {
        const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        return [ratio, `${element.className}: ${element.textContent}`];
    });
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_dark_and_light_themes_are_readable_and_selectable(browser: Browser, dark: bool) -> None:
    lost = [*going_on(60), pageevents.fault(60)]
    with serving(lost) as (_, url), opened(browser, url, dark=dark, still=True) as (tab, seen):
        expect(tab.locator("#timeline canvas")).to_be_visible()
        expect(node(tab, "coarse")).to_have_attribute("data-state", "lost")
        assert _is_dark(tab) == dark
        contrasts = tab.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [found for found in contrasts if found[0] < 4.5] == []
        running = "getComputedStyle(document.querySelector('.node[data-state=lost]')).animationName"
        assert tab.evaluate(running) == "none"  # as the system wishes
        button, charts = tab.locator("#theme"), picture(tab, "#loss")
        expect(button).to_have_text("Automatic")
        button.click()
        button.click()
        expect(button).to_have_text("Dark")
        assert _is_dark(tab)
        button.click()
        button.click()
        expect(button).to_have_text("Light")
        assert not _is_dark(tab)
        poll_for(lambda: dark == (picture(tab, "#loss") != charts), "the charts to follow")
        tab.reload()
        expect(button).to_have_text("Light")
        assert seen.errors == []


def _is_dark(tab: Tab) -> bool:
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", ground)[:3])) < 200


def test_with_a_token_and_tls_the_page_works_and_hides_the_token(
    browser: Browser, tmp_path: Path
) -> None:
    authority.create(tmp_path / "certs")
    folder = authority.issue(tmp_path / "certs", "driver", identity.DRIVER, ["localhost"], 1)
    place = Endpoint.open("0.0.0.0:0", folder)
    with serving(going_on(20), place) as (_, url):
        with opened(browser, url) as (tab, seen):
            expect(tab.locator("#connection")).to_have_text("Live")
            expect(tab.locator("#steps")).to_contain_text("Step 20")
            assert tab.url == f"https://localhost:{place.port}/"
            assert tab.evaluate("document.cookie") == ""
            tab.reload()
            expect(tab.locator("#steps")).to_contain_text("Step 20")
            assert seen.errors == []
        with opened(browser, f"https://localhost:{place.port}/") as (tab, _):
            expect(tab.locator("body")).to_contain_text("403: open the address that")


def test_a_report_is_one_self_contained_file(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html([pageevents.record("unet", pageevents.run(60, 30))]), encoding="utf-8")
    with opened(browser, path.as_uri()) as (tab, seen):
        expect(tab.locator("#connection")).to_have_text("Report")
        expect(tab.locator("#status")).to_have_text("done")
        expect(tab.locator("#timeline canvas")).to_be_visible()
        expect(node(tab, "finish")).to_have_attribute("data-state", "ended")
        expect(tab.locator(".event.fault")).to_have_count(1)
        assert seen.errors == []
        assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []


def test_a_report_of_two_runs_overlays_their_curves(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    events_by_run = {"first": [*pageevents.run(60)], "second": [*pageevents.run(90, 30)]}
    for event in events_by_run["second"]:
        if event["event"] == "eval":
            event["loss"] = 0.5
    runs = [pageevents.record(name, events) for name, events in events_by_run.items()]
    path.write_text(html(runs), encoding="utf-8")
    with opened(browser, path.as_uri()) as (tab, seen):
        expect(tab.locator("#curves-legend")).to_have_text(re.compile(r"first\s*second"))
        table = tab.locator("#comparison-table")
        expect(table.locator("tr", has_text="faults")).to_have_text(re.compile(r"faults\s*0\s*1"))
        expect(table).to_contain_text(re.compile(r"Settings that differ\s*None\."))
        expect(table).to_contain_text("The losses of all 60 steps in common are the same")
        expect(tab.locator(".event.fault")).to_have_count(0)
        expect(tab.locator(".event.evaluation .text").first).not_to_contain_text("loss 0.5")
        tab.locator("#runs").select_option("second")
        expect(tab.locator(".event.fault")).to_have_count(1)
        expect(tab.locator("#steps")).to_contain_text("Step 90 of 90")
        expect(tab.locator(".event.evaluation .text").first).to_contain_text("loss 0.5")
        assert seen.errors == []
