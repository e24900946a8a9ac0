"""A job from outside its processes: servers, generations, recovery, checkpoints, `rpcmp.launch`.

Start at `drive.py` and `run.py`; `generation.py` is one group from birth to end. No torch but in
`pipeline.py`. May import what is below: server, observability, checkpoint, net, process, config.
"""
