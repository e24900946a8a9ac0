"""Everything that observes a run, without delaying it.

Start at `events/` and `observers.py`. `run_folder.py` keeps a run, `dashboard/` is its page,
`run_metrics.py` its metrics, `trace/` its spans and their analysis. May import what is below:
checkpoint, rpc, net, process, pipelining, config. No torch.
"""
