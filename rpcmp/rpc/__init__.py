"""The interface to torch RPC: the agent, its unpickler, the messages of a step, tensors as bytes.

Start at `transport.py`, the only module that touches torch RPC and its private parts. `messages.py`
defines the messages. May import the packages below: net, process, pipelining, config.
"""
