"""A job that runs until it is stopped."""

from __future__ import annotations

LONG_JOB = """
name = "long-job"
steps = 100000
[model]
layers = "zoo:jittery"
kwargs = { milliseconds = 5.0 }
balance = [3, 2]
"""

IDLING = LONG_JOB.replace("5.0", "20.0")
"""The same, which leaves the processor to others."""
