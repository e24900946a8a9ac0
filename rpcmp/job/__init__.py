"""A job from outside its processes: servers, generations, recovery, checkpoints, `rpcmp.launch`.

This is the supervisor of the driver process, whose own code is the package `driver`. Start at
`recovery.py`: its loop forms one `Generation` after another, for a run that trains
(`training_run.py`) or a pipeline that serves calls (`service.py`). `failure_detection.py` lists how
each failure is noticed, and after how long. Only the library imports torch: `pipeline.py` and
`service.py`. May import driver, server, and everything below.
"""
