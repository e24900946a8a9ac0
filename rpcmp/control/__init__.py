"""The control plane: health, job control and rendezvous over gRPC."""
