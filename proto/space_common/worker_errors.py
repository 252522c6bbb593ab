"""Beginnings of a worker's errors that the router tells from others."""

from __future__ import annotations

CONTRADICTION = "The request's own fields leave no token"
"""The client is at fault: bad_words, allowed ids, biases or min_tokens forbid all that is possible, and nothing else
went wrong."""
