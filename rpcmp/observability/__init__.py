"""Everything that looks at a run, and none of which can hold it up.

Start at `observers.py`. `run_folder/` keeps a run, `dashboard/` is its page, `prometheus/` its
metrics, `trace/` its spans and what they tell. May import what is below: checkpoint, rpc, net,
process, pipelining, config. No torch.
"""
