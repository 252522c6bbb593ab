"""Quantised weights, dequantised or kept packed."""
