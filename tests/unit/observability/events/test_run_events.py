"""Log records as events."""

from __future__ import annotations

import logging

from rpcmp.observability.events import LogEvent
from rpcmp.process.logging.collector import Display
from rpcmp.process.logging.records import Line, entry_of


def test_log_event_equals_the_entry_of_its_line() -> None:
    entry = entry_of(Line("INFO", "stdout", "hello", 3, 2), "stage0", 1)
    assert LogEvent.from_entry(entry).to_json() == entry


def test_log_event_is_made_of_a_record_whose_logger_has_no_name() -> None:
    events: list[LogEvent] = []
    display = Display()
    with display.reporting(lambda entry: events.append(LogEvent.from_entry(entry))):
        display.emit(
            logging.makeLogRecord({"msg": "anonymous", "levelname": "WARNING", "levelno": 30})
        )
    display.finish()
    assert [(event.logger, event.text) for event in events] == [("None", "anonymous")]
