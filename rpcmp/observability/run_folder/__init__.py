"""The folder that is kept of each run, and what a report can read from it.

NAME-20261122-101500/
  run.json         name, versions, times, the run that it continues, the outcome
  config.json      the config, without secrets
  metrics.jsonl    a line per step and a line per evaluation
  events.jsonl     all other events
  log.txt          the output that a terminal would have shown
  trace.json.gz    the last steps, for Perfetto and `rpcmp trace`
"""
