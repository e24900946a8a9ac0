"""A stage's state after a step: in memory that outlives its worker, and in files.

Start at `slots.py`, which proves that two snapshots are enough, and `manifest.py`. No torch but in
`stage_state.py`. May import what is below: rpc, net, process, pipelining, config.
"""
