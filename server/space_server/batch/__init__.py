"""The sequences of a running batch, from admission to the end."""
