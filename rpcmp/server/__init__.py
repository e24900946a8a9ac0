"""The stage server: a supervisor that outlives many jobs; its gRPC services, and their client.

Start at `stage_server.py`, and `claim.py` for one job's hold on it. Imports torch only in
`host_facts.py`, in functions that a child process runs. May import the packages below:
observability, checkpoint, net, process, pipelining, config.
"""
