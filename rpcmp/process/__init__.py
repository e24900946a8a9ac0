"""Supervisor and child: how the two halves of every host part of rpcmp hold together.

Start at `child.py` (the supervisor's side) and `channel.py` (the child's); `__main__.py` is the
fork server. May import config. No torch but in the fork server.
"""
