"""The stage server: a supervisor that outlives many jobs; its gRPC services, and their client.

Start at `server.py`, and `claim.py` for one job's hold on it. Never imports torch. May import what
is below: observability, checkpoint, net, process, config.
"""
