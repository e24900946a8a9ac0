"""Starts a process of a peer; the bond with the benchmark comes before torch."""

from rpcmp.process.channel import connect_to_supervisor

if __name__ == "__main__":
    channel = connect_to_supervisor().channel
    from rpcmp.tools.bench.peers.process import run

    run(channel)
