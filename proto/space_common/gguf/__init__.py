"""GGUF files as checkpoints: what router and worker read of them besides the numbers of the weights."""
