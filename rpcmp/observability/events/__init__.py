"""The events of a run: their definitions, their wording, and the stream that the driver emits.

Everything that observes a run sees these events: the terminal, `--json`, the run folder, the page,
the metrics, TensorBoard and the user's loggers.
"""
