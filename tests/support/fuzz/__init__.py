"""Malformed inputs by the thousand, at every port of a stage server, while it trains.

`inputs` makes them from valid `conversations`; `entry_points` are the ways to connect, `sender`
uses them with many connections at once, and `siege` combines all of that with a running job.
"""
