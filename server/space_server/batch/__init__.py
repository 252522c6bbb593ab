"""Sequences of the running batch, from admission to their end."""
