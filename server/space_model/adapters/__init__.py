"""Gated adapters."""
