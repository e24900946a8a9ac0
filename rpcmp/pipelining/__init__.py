"""Rules of a pipeline: schedules, their simulation, plans for given hosts, how layers are built.

Start at `schedule.py`, which draws the schedules, and `assignment.py`. `microbatches.py` cuts a
mini-batch, `random_streams.py` derives every seed. No processes and no messages. May import
splitting and config.
"""
