"""The rows of a step and the location of their keys and values in the paged KV cache."""
