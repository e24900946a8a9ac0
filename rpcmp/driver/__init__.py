"""The driver process: the training loop, and the stages as one model.

This is the child process; its supervisor, which recovers the run, is the package `job`. Start at
`training.py`, and `stage_group.py` for what it calls. Comments such as `stage.py [2]` follow one
training step through the diagram in `worker/stage.py`. May import the packages below: worker, data,
observability, checkpoint, rpc, process, pipelining, config.
"""
