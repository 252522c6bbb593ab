"""The port of a worker: its secret."""
