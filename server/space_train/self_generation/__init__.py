"""Text that the model writes for its own training."""
