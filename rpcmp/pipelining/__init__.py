"""Pure rules of a pipeline: schedules, their simulation, the cut of a model, its layers.

Start at `schedule.py`, which draws the schedules, and `assignment.py`. May import config.
"""
