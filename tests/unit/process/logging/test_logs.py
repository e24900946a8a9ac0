"""Log lines on their way into one log: in order, bounded, and complete to the last line."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.process.logging import capture
from rpcmp.process.logging.capture import Sender
from rpcmp.process.logging.collector import Display, Receiver, RecordSource, unreported
from rpcmp.process.logging.records import (
    BURST,
    FIRST,
    KINDS,
    LONGEST,
    MAX_BYTES,
    MAX_TEXT,
    NOTE,
    SECONDS,
    Entry,
    Line,
    LogRateLimiter,
    as_json,
    as_text,
    cut,
    entry_of,
    pass_on,
    unpack,
)
from rpcmp.server.claim_log import AT_ONCE, KEPT, LogBuffer


def info(text: str) -> Line:
    return Line("INFO", "stdout", text)


# Lines


@given(st.text(max_size=50), st.text(max_size=50), st.integers(0, 10**9))
def test_a_line_survives_pack_and_unpack(logger: str, text: str, step: int) -> None:
    line = Line("WARNING", logger, text, step, 3)
    assert unpack(line.pack()) == line


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}", "\0", "\ud800"])
def test_a_line_of_megabytes_loses_its_middle(character: str) -> None:
    whole = f"begin {character * 3_000_000} end"
    text = cut(whole)
    assert text.startswith("begin ")
    assert text.endswith(" end")
    written = len(whole.encode(errors="backslashreplace").decode())
    assert f" ... {written - MAX_TEXT + NOTE:,} characters left out ... " in text
    assert cut(text) == text  # a text that was cut is not cut again
    assert len(info(text).pack()) <= MAX_BYTES


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", b"[1]", b"{}", b'["INFO", "a", "b", 1, "2"]', b"[" * 60_000]
)
def test_unpack_refuses_other_data(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, and ours
        unpack(data)


# Flood control


def test_the_first_lines_of_a_kind_pass_and_the_rest_is_counted() -> None:
    fold = LogRateLimiter()
    passed = [line for n in range(100) for line in fold.take(info(f"loss {n / 7} at {n}"), 0.0)]
    assert [line.text for line in passed] == [f"loss {n / 7} at {n}" for n in range(FIRST)]
    assert fold.due(SECONDS - 0.1) == []
    assert fold.next_due() == SECONDS
    assert fold.due(SECONDS) == [replace(info(f"loss {99 / 7} at 99"), count=100 - FIRST)]
    assert fold.next_due() is None


def test_lines_that_differ_in_words_or_level_are_of_different_kinds() -> None:
    fold = LogRateLimiter()
    for n in range(2 * FIRST):
        fold.take(info(f"step {n}"), 0.0)
    assert fold.take(info("step 9 is the last"), 0.0)
    assert fold.take(Line("ERROR", "stdout", "step 9"), 0.0)
    assert fold.take(info("step 9"), 0.0) == []


def test_a_continuing_kind_is_summarized_ever_more_rarely() -> None:
    fold, reported = LogRateLimiter(), []
    for tenth in range(6000):
        now = tenth / 10
        reported += [now for line in fold.take(info(f"n {tenth}"), now) if line.count > 1]
    pauses = [after - before for before, after in itertools.pairwise(reported)]
    assert pauses[0] == pytest.approx(2 * SECONDS)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST, abs=0.2)


def test_a_kind_passes_again_after_a_quiet_window() -> None:
    fold = LogRateLimiter()
    for n in range(2 * FIRST):
        fold.take(info(f"n {n}"), 0.0)
    fold.due(SECONDS)
    fold.due(SECONDS + 2 * SECONDS)
    assert fold.take(info("n 1"), 4 * SECONDS) == [info("n 1")]


@given(st.lists(st.tuples(st.text("ab 1", max_size=6), st.floats(0, 3)), max_size=400))
def test_no_line_is_lost_or_counted_twice(texts_and_pauses: list[tuple[str, float]]) -> None:
    fold, now, reported = LogRateLimiter(), 0.0, []
    for text, pause in texts_and_pauses:
        now += pause
        reported += fold.take(info(text), now)
    reported += fold.flush()
    assert sum(line.count for line in reported) == len(texts_and_pauses)
    assert fold.next_due() is None


def words(number: int) -> str:
    """Return a text of words without digits that differs by number."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_memory_and_rate_are_bounded_for_any_lines() -> None:
    fold = LogRateLimiter()
    number = 20 * KINDS
    reported = [line for n in range(number) for line in fold.take(info(words(n)), 0.0)]
    assert len(reported) <= BURST
    rest = fold.flush()
    assert len(rest) <= KINDS + 1
    left_out = [line.text for line in rest if "lines left out" in line.text]
    counted = sum(int(text.split()[1].replace(",", "")) for text in left_out)
    assert len(reported) + len(rest) - len(left_out) + counted == number


def test_half_a_surrogate_pair_is_escaped() -> None:
    """It may come from a file name that is not UTF-8; files and messages do not accept it."""
    text = cut("found a\udc80.txt")
    assert text == "found a\\udc80.txt"
    lines = LogBuffer()
    lines.add(Line("INFO", "stdout", text))
    assert [line.text for line in lines.after(0)] == [text]


def test_long_lines_cost_more_of_the_budget() -> None:
    fold = LogRateLimiter()
    reported = [line for n in range(50) for line in fold.take(info(words(n) + " " * MAX_TEXT), 0.0)]
    assert 0 < len(reported) < 10


# From a process to its supervisor


def logged_lines(speak: Callable[[], None], step: int = 7) -> list[Line]:
    """Return the supervisor's log of a child that captures all output and runs `speak`."""

    async def collect() -> list[Line]:
        received: list[Line] = []
        receiver = Receiver(received.append)
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                sys.excepthook, logging.root.handlers = sys.__excepthook__, []
                line, memory = map(os.dup, receiver.fds)
                sender = Sender(line, memory, lambda: step)
                capture.start(sender)
                speak()
                sender.flush()
            os._exit(0)
        receiver.start(asyncio.get_running_loop())
        await asyncio.to_thread(os.waitpid, pid, 0)
        receiver.close()
        return received

    return asyncio.run(collect())


def connected(receiver: Receiver) -> Sender:
    """Return a sender that is connected to `receiver` in this process."""
    line, memory = map(os.dup, receiver.fds)
    return Sender(line, memory)


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_prints_warnings_and_records_come_in_order() -> None:
    def speak() -> None:
        print("first", 1)
        warnings.warn("careful", stacklevel=1)
        logging.getLogger("mine").warning("got %d", 3)
        logging.getLogger("mine").info("not asked for")
        sys.stderr.write("ERROR: to standard error\n")
        try:
            raise KeyError("planted")
        except KeyError:
            logging.exception("it failed")

    lines = logged_lines(speak)
    assert [(line.level, line.logger) for line in lines] == [
        ("INFO", "stdout"),
        ("WARNING", "py.warnings"),
        ("WARNING", "mine"),
        ("ERROR", "stderr"),
        ("ERROR", "root"),
    ]
    assert texts(lines)[0] == "first 1"
    assert texts(lines)[1].startswith("UserWarning: careful (test_logs.py:")
    assert texts(lines)[2] == "got 3"
    assert texts(lines)[4].startswith("it failed\nTraceback")
    assert texts(lines)[4].endswith("KeyError: 'planted'")
    assert {line.step for line in lines} == {7}


def test_basic_config_works_without_a_second_handler() -> None:
    def speak() -> None:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s says %(message)s")
        logging.getLogger("mine").debug("details")

    assert logged_lines(speak) == [Line("DEBUG", "mine", "details", 7)]


def test_threads_do_not_mix_their_lines_and_report_their_errors() -> None:
    def fail() -> None:
        print("from the", end=" ")
        print("thread")
        raise ValueError("planted")

    def speak() -> None:
        print("from the", end=" ")
        thread = threading.Thread(target=fail, name="loader")
        thread.start()
        thread.join()
        print("main")

    lines = texts(logged_lines(speak))
    assert [lines[0], lines[2]] == ["from the thread", "from the main"]
    assert lines[1].startswith("in thread 'loader': Traceback")


def test_updates_of_a_progress_bar_are_lines_of_one_kind() -> None:
    def speak() -> None:
        for percent in range(100):
            sys.stderr.write(f"\r{percent}%|{'█' * (percent // 10):10}| {percent}/100")
            sys.stderr.flush()

    lines = logged_lines(speak)
    assert len(lines) == FIRST + 1
    assert lines[-1].text == "99%|█████████ | 99/100"
    assert lines[-1].count == 100 - FIRST


def test_lines_of_forked_processes_arrive() -> None:
    def speak() -> None:
        for n in range(50):
            print("many", n)  # starts a thread, which the fork does not have
        pid = os.fork()
        if not pid:
            for n in range(50):
                print("many in the fork", n)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        print("after it")

    lines = texts(logged_lines(speak))
    assert "many in the fork 0" in lines
    assert "after it" in lines


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", [1, 3, 1000])
def test_the_last_line_before_a_crash_arrives(number: int) -> None:
    def speak() -> None:
        for n in range(number):
            print("about to divide", n)
        crash()

    lines = logged_lines(speak)
    assert lines[-1].text == f"about to divide {number - 1}"
    assert sum(line.count for line in lines) == number


def test_flushed_text_arrives_before_a_crash() -> None:
    def speak() -> None:
        print("loading ...", end="", flush=True)
        crash()

    assert texts(logged_lines(speak)) == ["loading ..."]


def test_sender_never_waits_for_its_supervisor() -> None:
    receiver = Receiver(lambda line: None)
    sender = connected(receiver)
    for n in range(5000):  # more than any buffer holds; a send that blocked would never return
        sender.log("INFO", "stdout", words(n) + "x" * 1000)
    received: list[Line] = []
    receiver._on_line = received.append
    receiver.receive_pending()
    assert 0 < len(received) < 5000
    receiver.close()
    assert received[-1].text.endswith("x" * 1000)


def test_dropped_lines_are_counted() -> None:
    received: list[Line] = []
    receiver = Receiver(received.append)
    sender = connected(receiver)
    fits = 0
    while sender._lost < 3:
        sender._send(info(words(fits) + "x" * 1000))
        fits += 1
    receiver.receive_pending()
    sender._send(info("there is room again"))
    receiver.receive_pending()
    assert texts(received)[-2].startswith("3 lines were lost")
    assert texts(received)[-1] == "there is room again"
    receiver.close()


def test_receiver_skips_invalid_datagrams() -> None:
    received: list[Line] = []
    receiver = Receiver(received.append)
    sender = connected(receiver)
    sender._socket.send(b"\xff nonsense")
    sender.log("INFO", "stdout", "sense")
    receiver.close()
    receiver.close()
    assert texts(received) == ["sense"]


# Numbered lines


def test_a_watcher_gets_each_line_once() -> None:
    lines = LogBuffer()
    last = 0
    received: list[str] = []
    for n in range(600):
        lines.add(info(f"{n}"))
        if n % 7 == 0:
            found = lines.after(last)
            last = found[-1].number
            received += [line.text for line in found]
    received += [line.text for line in lines.after(last)]
    assert received == [f"{n}" for n in range(600)]
    assert lines.after(lines.newest) == []


def test_a_watcher_that_is_behind_sees_the_gap() -> None:
    lines = LogBuffer()
    for n in range(KEPT + 10):
        lines.add(info(f"{n}"))
    assert lines.after(0)[0].number == 11


def test_a_message_to_a_watcher_is_bounded() -> None:
    lines = LogBuffer()
    for _ in range(100):
        lines.add(info("x" * MAX_TEXT))
    found = lines.after(0)
    assert 1 < len(found) < 100
    assert sum(len(line.text) for line in found) <= AT_ONCE
    assert lines.after(found[-1].number)[0].number == found[-1].number + 1


# The format


def test_an_entry_is_one_line_with_its_place() -> None:
    entry = entry_of(Line("WARNING", "mine", "careful", 12, 58), "stage0", 2)
    assert (
        as_text(entry)[23:] == " WARNING generation 2 stage0 step 12: careful (... 57 more like it)"
    )
    assert json.loads(as_json(entry)) == {
        "time": entry["time"],
        "level": "WARNING",
        "generation": 2,
        "stage": "stage0",
        "step": 12,
        "logger": "mine",
        "message": "careful",
        "count": 58,
    }


def test_texts_cannot_forge_lines_or_drive_a_terminal() -> None:
    entry = entry_of(info("red \x1b[31mink\x1b[0m\r\nsecond\x07\x1b]0;title\x07"), "stage0", 1)
    first, *more = as_text(entry).splitlines()
    assert first.endswith(": red ink")
    assert all(line.startswith("    ") for line in more)
    assert "\x1b" not in as_text(entry)


class Reader(io.StringIO):
    """A stream whose writes block while `gate` is cleared, as if its reader were slow."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def write(self, text: str) -> int:
        self.gate.wait()
        return super().write(text)


def test_records_of_this_process_and_entries_have_one_format() -> None:
    stream = Reader()
    display = Display(stream)
    display.source = lambda: RecordSource("stage 1", 3, 4)
    display.emit(logging.makeLogRecord({"levelname": "WARNING", "levelno": 30, "msg": "careful"}))
    display.show(entry_of(Line("DEBUG", "mine", "details"), "stage1", 3))
    display.show(entry_of(info("printed"), "stage1", 3))
    display.finish()
    shown = [line[24:] for line in stream.getvalue().splitlines()]
    assert shown == [
        "WARNING generation 3 stage 1 step 4: careful",
        "INFO generation 3 stage1: printed",
    ]


def test_records_of_this_process_are_limited_and_summarized_at_the_end() -> None:
    stream = Reader()
    display = Display(stream)
    for n in range(100):
        record = {"levelname": "WARNING", "levelno": 30, "msg": f"another user, number {n}"}
        display.emit(logging.makeLogRecord(record))
    display.finish()
    shown = stream.getvalue().splitlines()
    assert len(shown) == FIRST + 1
    assert shown[-1].endswith(f"number 99 (... {100 - FIRST - 1} more like it)")


def test_display_never_waits_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.process.logging.collector.MAX_QUEUED", 10)
    stream = Reader()
    stream.gate.clear()
    display = Display(stream)
    for n in range(100):
        display.show(entry_of(info(f"{n}"), "stage0", 1))
    stream.gate.set()
    display.drain()
    display.show(entry_of(info("at last"), "stage0", 1))
    display.finish()
    assert "lines were left out: standard error was not read in time" in stream.getvalue()
    assert stream.getvalue().endswith("at last\n")


def test_display_survives_a_closed_stream() -> None:
    stream = Reader()
    stream.close()
    display = Display(stream)
    display.show(entry_of(info("unheard"), "stage0", 1))
    display.finish()


def test_records_of_this_process_are_reported_to_observers() -> None:
    stream, reported = Reader(), list[Entry]()
    display = Display(stream)
    with display.reporting(reported.append):
        display.emit(logging.makeLogRecord({"levelname": "ERROR", "levelno": 40, "msg": "lost"}))
    display.finish()
    assert [(entry["level"], entry["text"]) for entry in reported] == [("ERROR", "lost")]
    assert stream.getvalue() == ""


def test_pass_on_uses_the_programs_handlers(caplog: pytest.LogCaptureFixture) -> None:
    pass_on(entry_of(Line("WARNING", "mine", "careful"), "stage0", 1))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("rpcmp.stages.stage0", "WARNING")
    assert record.getMessage() == "careful"


def test_pass_on_prints_without_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    pass_on(entry_of(info("printed"), "stage0", 1))
    assert "INFO generation 1 stage0: printed\n" in capsys.readouterr().err


def test_finish_returns_at_once_on_every_call() -> None:
    stream = Reader()
    display = Display(stream)
    display.show(entry_of(info("said"), "stage0", 1))
    for _ in range(2):
        display.finish()
    assert stream.getvalue().endswith("said\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "rpcmp-log"]


def test_display_survives_a_failing_report(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(entry: Entry) -> None:
        raise KeyError("a bug")

    stream = Reader()
    display = Display(stream)
    with display.reporting(fail):
        display.emit(logging.makeLogRecord({"levelname": "INFO", "levelno": 20, "msg": "lost"}))
    display.show(entry_of(info("found"), "stage0", 1))
    display.finish()
    assert stream.getvalue().endswith("found\n")
    assert "KeyError: 'a bug'" in capsys.readouterr().err


def test_unreported_lines_have_their_own_rate_limit() -> None:
    stream, reported = Reader(), list[Entry]()
    display = Display(stream)
    record = logging.makeLogRecord({"levelname": "INFO", "levelno": 20, "msg": "again"})
    with display.reporting(reported.append):
        for _ in range(FIRST + 15):
            display.emit(record)
        with unreported():
            display.emit(record)
    display.finish()
    assert sum(entry["count"] for entry in reported) == FIRST + 15
    assert len(stream.getvalue().splitlines()) == 1
