"""The driver process: the training loop, and the stages as one model.

Start at `training.py`, and `stage_group.py` for what it calls. May import what is below: worker,
data, checkpoint, rpc, ...
"""
