"""The messages that a worker sends: hello, steps and sequences."""
