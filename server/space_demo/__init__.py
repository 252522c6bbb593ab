"""The embedded model: data only, opened through importlib.resources."""
