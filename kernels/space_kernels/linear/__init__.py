"""Linear layers on CPU and GPU: packed, int8, fp8, gated deltas, mixtures of experts."""
