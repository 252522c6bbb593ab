"""One request: its state, its stream, and the messages about it."""
