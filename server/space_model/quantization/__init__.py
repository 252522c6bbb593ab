"""Quantised weights, unpacked or kept packed."""
