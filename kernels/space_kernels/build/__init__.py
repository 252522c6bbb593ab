"""Compiled operations: building, caching and calling them."""
