"""Malformed inputs by the thousand, sent to every port of a stage server while it trains.

`inputs` creates them from valid `conversations`. `entry_points` has the ways to connect, and
`sender` uses them with many connections at once. `siege` combines all of this with a running job.
"""
