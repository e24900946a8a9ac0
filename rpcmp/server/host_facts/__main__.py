"""Starts the process that looks at what needs torch or the user's code.

The bond with the supervisor comes first, before anything that may take time: a supervisor that dies
meanwhile must not leave a process behind.
"""

from rpcmp.process.channel import connect_to_supervisor

if __name__ == "__main__":
    channel = connect_to_supervisor().channel
    from rpcmp.server.host_facts.process import run

    run(channel)
