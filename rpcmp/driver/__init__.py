"""The driver process: the training loop, and the stages as one model.

Start at `training.py`, and `stage_group.py` for what it calls. May import the packages below:
worker, data, observability, checkpoint, rpc, process, pipelining, config.
"""
