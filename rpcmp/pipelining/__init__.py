"""Rules of a pipeline: schedules, their simulation, the cut of a model, and how layers are built.

Start at `schedule.py`, which draws the schedules, and `assignment.py`. No processes and no
messages. May import config.
"""
