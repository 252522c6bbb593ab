"""Tensor parallelism: one model over several processes."""
