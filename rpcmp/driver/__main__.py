"""Starts the driver process.

The bond with the supervisor comes first, before anything that may take time: a supervisor that dies
meanwhile must not leave a process behind.
"""

from rpcmp.process.channel import connect_to_supervisor

if __name__ == "__main__":
    bond = connect_to_supervisor()
    from rpcmp.driver.process import run

    run(bond)
