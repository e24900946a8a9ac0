"""What is kept of each run: a folder that outlives it, and what can be told from it.

NAME-20261122-101500/
  run.json         name, versions, when, what it continues, how it ended
  config.json      the config, without what was given in confidence
  metrics.jsonl    a line a step and a line an evaluation
  events.jsonl     everything else that happened
  log.txt          what a terminal would have shown
  trace.json.gz    the last steps, for Perfetto and `rpcmp trace`
"""
