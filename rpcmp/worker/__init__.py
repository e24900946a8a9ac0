"""The worker process: it computes one stage, is a member of one group, and ends with it.

Start at `stage.py`, whose diagram follows a training step; comments such as `stage.py [7]` refer to
it. `grad_sync.py` sums the gradients of replicas and tied parameters, and `profiler.py` measures
layers. Rooms of their own: `state/`, what forwards keep, and `checks/`, what is asked in the first
steps. May import the packages below: data, observability, checkpoint, rpc, process, pipelining,
config.
"""
