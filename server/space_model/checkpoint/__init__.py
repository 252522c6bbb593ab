"""Checkpoints on disk: configs, tensors, and the checks before a weight is read."""
