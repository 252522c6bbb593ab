"""Formats of tool calls, one a module, and the table of all of them."""
