"""Beginnings of a worker's errors that the router tells from others."""

from __future__ import annotations

CONTRADICTION = "The request's own fields leave no token"
"""The client is at fault: bad_words, allowed ids, biases or min_tokens forbid all that is possible, and nothing else
went wrong."""

GRAMMAR = "The grammar "
"""The client is at fault: its grammar cannot be compiled, or has no text that goes on, within the limits."""

GRAMMARS_BUSY = "Other grammars took the time"
"""The same request may be answered later."""
