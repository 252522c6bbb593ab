"""Sampling: parameters, logits processors, keyed noise, and the choice itself."""
