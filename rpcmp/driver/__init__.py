"""The driver process: the training loop, and the stages as one model."""
