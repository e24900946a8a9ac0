"""The process that computes: owns one stage, is one member of one group, is then thrown away.

Start at `stage.py`, whose diagram follows a step. `grad_sync/` adds up the gradients of replicas
and tied parameters, `profiler/` measures layers. May import what is below: data, checkpoint, rpc,
...
"""
