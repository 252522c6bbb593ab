"""Attention of a SPACE step: the torch definition and one module per implementation."""
