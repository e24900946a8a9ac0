"""From host to host: one port a server, mutual TLS on all that crosses it, and the relay."""
