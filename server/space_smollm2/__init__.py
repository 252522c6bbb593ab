"""The default model's masks and draft head: data only, opened through importlib.resources; the weights are fetched."""
