"""GGUF files as checkpoints: everything that router and worker read from them except the weights' values."""
