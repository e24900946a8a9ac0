"""Malformed inputs by the thousand, at every port of a stage server, while it trains.

`inputs` makes them from `conversations`, which are in order; a `door` is a way in, `sender` goes
through it with many connections at once, and a `siege` is all of that around a job that runs.
"""
