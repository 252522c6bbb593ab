"""Requests that wait: order, admission, and the choice of a worker."""
