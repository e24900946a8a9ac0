"""What `rpcmp drive` says of faults, recoveries and checkpoints: one line each."""

from __future__ import annotations

from rpcmp.process.channel import Message


def line(event: Message) -> str:
    """One line for one event."""
    match event["event"]:
        case "fault":
            return f"lost after step {event['step']}: {event['error']}"
        case "recovered":
            return (
                f"going on from step {event['step']} as generation {event['generation']}, "
                f"after {event['seconds']:.1f} s"
            )
        case "waiting":
            return f"waiting for the server of stage {event['stage']!r} at {event['address']}"
        case "replaced":
            return (
                f"the spare at {event['address']} takes stage {event['stage']!r}, whose server at "
                f"{event['lost']} is gone"
            )
        case "resumed":
            return _resumed(event)
        case "checkpoint":
            return f"checkpoint of step {event['step']} in {event['path']}"
    return f"warning: {event['text']}"


def _resumed(event: Message) -> str:
    if not event["step"]:
        return "no checkpoint to resume from: starting from the beginning"
    changed = f" (changed since: {', '.join(event['changed'])})" if event["changed"] else ""
    return f"resuming after step {event['step']}{changed}"
