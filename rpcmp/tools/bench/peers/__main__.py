"""Starts a process of a peer; the bond with the benchmark comes before torch."""

from rpcmp.process.channel import begin_child

if __name__ == "__main__":
    channel = begin_child().channel
    from rpcmp.tools.bench.peers.process import run

    run(channel)
