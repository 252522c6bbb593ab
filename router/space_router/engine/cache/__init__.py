"""The blocks of a worker's KV cache and the keys of their content."""
