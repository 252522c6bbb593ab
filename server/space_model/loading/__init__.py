"""From a checkpoint to a loaded model."""
