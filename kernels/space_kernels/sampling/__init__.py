"""Sampling: parameters, logits processors, keyed noise, and the sampling itself."""
