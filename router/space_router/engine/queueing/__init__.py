"""Waiting requests: their order, admission, and the choice of a worker."""
